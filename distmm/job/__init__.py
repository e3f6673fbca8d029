"""Products of matrices on disk, which may be larger than all memory: resumable, with a certificate.

`README.md` in this folder explains which code runs in which process, and in which order data are synced.
"""

from __future__ import annotations

from distmm.job.calls import multiply, resume
from distmm.job.certificate import recheck
from distmm.job.job_status import Status, status
from distmm.job.reduced_calls import threshold, topk
from distmm.job.spec import Check
from distmm.job.stop import Stop
from distmm.job.summary import Summary

__all__ = [
    "Check",
    "Status",
    "Stop",
    "Summary",
    "multiply",
    "recheck",
    "resume",
    "status",
    "threshold",
    "topk",
]

"""Products of matrices on disk, larger than all memory: block by block, resumable after anything, with a certificate.

`run` has the calls, `job` one run from lock to C's name, `loop` what the client does meanwhile, `wave` the graph of one
wave and what its workers write, `sketch` the test of each block; `folder`, `lock` and `spec` are what stands beside C
until it is complete, `state` says how far it is, and `certificate` is what is left.
"""

from __future__ import annotations

from distmm.job.calls import multiply, resume
from distmm.job.certificate import recheck
from distmm.job.job_status import Status, status
from distmm.job.spec import Check
from distmm.job.stop import Stop
from distmm.job.summary import Summary

__all__ = ["Check", "Status", "Stop", "Summary", "multiply", "recheck", "resume", "status"]

"""Products of matrices on disk, larger than all memory: block by block, resumable after anything, with a certificate.

`run` has the calls, `loop` the client's side of a running job, `wave` the graph of one wave and what its workers write,
`sketch` the test of each block, `folder`, `lock` and `spec` what stands beside C meanwhile, `certificate` what is left.
"""

from __future__ import annotations

from distmm.job.certificate import recheck
from distmm.job.run import Summary, multiply, resume
from distmm.job.spec import Check
from distmm.job.status import Status, status
from distmm.job.stop import Stop

__all__ = ["Check", "Status", "Stop", "Summary", "multiply", "recheck", "resume", "status"]

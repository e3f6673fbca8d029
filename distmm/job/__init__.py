"""Products of matrices on disk, which may be larger than all memory: resumable, with a certificate.

`README.md` in this folder explains which code runs in which process, and in which order data are synced.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distmm.job.calls import multiply, resume
    from distmm.job.certificate import recheck
    from distmm.job.records import Status, status
    from distmm.job.reduced import threshold, topk
    from distmm.job.spec import Check
    from distmm.job.stop import Stop
    from distmm.job.summary import Summary

__all__ = [
    "Check", "Status", "Stop", "Summary", "multiply", "recheck", "resume", "status", "threshold", "topk",
]  # fmt: skip

_MODULE_OF = {
    "Check": "spec", "Status": "records", "Stop": "stop", "Summary": "summary", "multiply": "calls",
    "recheck": "certificate", "resume": "calls", "status": "records", "threshold": "reduced",
    "topk": "reduced",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name on first use (PEP 562): `status` needs neither Dask nor Zarr."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'distmm.job' has no attribute {name!r}")
    return getattr(import_module(f"distmm.job.{_MODULE_OF[name]}"), name)

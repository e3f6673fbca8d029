"""distmm: dense matrix products of any size, on all the GPUs you have.

>>> import dask.array as da, distmm
>>> A = da.random.random((1000, 800), chunks=500)
>>> B = da.random.random((800, 600), chunks=500)
>>> distmm.matmul(A, B).sum().compute() > 0
True
"""

from distmm import interrupts

interrupts.while_imported()

# ruff: noqa: E402  the imports below take a second, in which Ctrl-C should already work
from typing import TYPE_CHECKING, Any

from distmm.accelerate import accelerate, accelerated
from distmm.api.array import gemm, gram, matmul
from distmm.api.einsum import einsum, multi_dot
from distmm.api.nearest import nearest
from distmm.api.plan import plan
from distmm.api.reductions import TopK, reduce, topk
from distmm.api.statistics import corrcoef, cov
from distmm.api.tensordot import tensordot
from distmm.api.threshold import Entries, threshold
from distmm.api.verify import verify
from distmm.checking.verdict import Verdict
from distmm.clusters.hardware import cpus, gpus
from distmm.errors import (
    DeviceMemoryError,
    DistmmError,
    DoesNotFitError,
    InputError,
    Stopped,
    UndecidedError,
    WrongResultError,
)
from distmm.planning.plan import Plan
from distmm.transfer import empty
from distmm.versions import VERSION

if TYPE_CHECKING:
    from distmm.job import multiply, resume, status

__version__ = VERSION

__all__ = [
    "DeviceMemoryError",
    "DistmmError",
    "DoesNotFitError",
    "Entries",
    "InputError",
    "Plan",
    "Stopped",
    "TopK",
    "UndecidedError",
    "Verdict",
    "WrongResultError",
    "accelerate",
    "accelerated",
    "corrcoef",
    "cov",
    "cpus",
    "einsum",
    "empty",
    "gemm",
    "gpus",
    "gram",
    "matmul",
    "multi_dot",
    "multiply",
    "nearest",
    "plan",
    "reduce",
    "resume",
    "status",
    "tensordot",
    "threshold",
    "topk",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import jobs on first use: with the storage libraries, the import takes half a second."""
    if name in ("multiply", "resume", "status"):
        from distmm import job

        return getattr(job, name)
    raise AttributeError(f"module 'distmm' has no attribute {name!r}")

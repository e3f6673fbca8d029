"""distmm: dense matrix products of any size, on all the GPUs you have.

>>> import dask.array as da, distmm
>>> A = da.random.random((1000, 800), chunks=500)
>>> B = da.random.random((800, 600), chunks=500)
>>> distmm.matmul(A, B).sum().compute() > 0
True
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from distmm import interrupts
from distmm.accelerate import accelerate, accelerated
from distmm.errors import (
    DeviceMemoryError,
    DistmmError,
    DoesNotFitError,
    InputError,
    Stopped,
    UndecidedError,
    WrongResultError,
)

if TYPE_CHECKING:
    from distmm.api.array import gemm, gram, matmul
    from distmm.api.einsum import einsum, multi_dot
    from distmm.api.plan import plan
    from distmm.api.reductions import TopK, nearest, reduce, topk
    from distmm.api.statistics import corrcoef, cov
    from distmm.api.tensordot import tensordot
    from distmm.api.threshold import Entries, threshold
    from distmm.api.verify import verify
    from distmm.checking.verdict import Verdict
    from distmm.clusters.hardware import cpus, gpus
    from distmm.job import multiply, resume, status
    from distmm.planning.plan import Plan
    from distmm.transfer import empty
    from distmm.versions import __version__ as __version__

interrupts.while_imported()

__all__ = [
    "DeviceMemoryError", "DistmmError", "DoesNotFitError", "Entries", "InputError", "Plan", "Stopped", "TopK",
    "UndecidedError", "Verdict", "WrongResultError", "accelerate", "accelerated", "corrcoef", "cov", "cpus",
    "einsum", "empty", "gemm", "gpus", "gram", "matmul", "multi_dot", "multiply", "nearest", "plan", "reduce",
    "resume", "status", "tensordot", "threshold", "topk", "verify",
]  # fmt: skip


# The modules of the names that are imported on first use: with Dask and NumPy, their imports take a second.
_MODULES = {
    "api.array": ("gemm", "gram", "matmul"), "api.einsum": ("einsum", "multi_dot"), "api.plan": ("plan",),
    "api.reductions": ("TopK", "nearest", "reduce", "topk"), "api.statistics": ("corrcoef", "cov"),
    "api.tensordot": ("tensordot",), "api.threshold": ("Entries", "threshold"), "api.verify": ("verify",),
    "checking.verdict": ("Verdict",), "clusters.hardware": ("cpus", "gpus"), "job": ("multiply", "resume", "status"),
    "planning.plan": ("Plan",), "transfer": ("empty",), "versions": ("__version__",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name on first use (PEP 562)."""
    if name in ("clusters", "job", "storage"):  # packages with public functions
        return import_module(f"distmm.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'distmm' has no attribute {name!r}")
    return getattr(import_module(f"distmm.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


if "dask" in sys.modules:  # its configuration then has the defaults of distmm at once
    import_module("distmm.config")

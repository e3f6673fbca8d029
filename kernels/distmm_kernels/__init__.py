"""Matrix products on one GPU or on the CPU: one kernel a file, all with `prepare`, `multiply` and `finish`.

`matmul`, `gram` and `verify` take arrays of PyTorch, CuPy, JAX, Numba and NumPy. Importing this package initialises
neither CUDA nor Numba. A kernel's modules are imported when it is selected.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from distmm_kernels.launch import cache as _cache

if TYPE_CHECKING:
    from distmm_kernels.arrays.matmul import gram, matmul
    from distmm_kernels.arrays.verify import verify

__all__ = ["gram", "matmul", "verify"]

_cache.sources()

_MODULES = {"gram": "matmul", "matmul": "matmul", "verify": "verify"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.arrays.{_MODULES[name]}"), name)
    globals()[name] = found
    return found

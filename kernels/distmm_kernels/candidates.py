"""The table of kernels: the rows of all files in `distmm_kernels.gemm`; `rates` says how fast each kernel is.

Those files import neither Numba nor CuPy, so a client without a GPU can read the table.
"""

from __future__ import annotations

import importlib
import pkgutil

from distmm_kernels import gemm
from distmm_kernels.candidate import Candidate

_FILES = sorted(module.name for module in pkgutil.iter_modules(gemm.__path__))
_MODULES = [importlib.import_module(f"{gemm.__name__}.{name}") for name in _FILES]

CANDIDATES: tuple[Candidate, ...] = tuple(row for module in _MODULES for row in getattr(module, "TABLE", ()))
"""The rows of each file that has a ``TABLE``, in alphabetical order of the files."""

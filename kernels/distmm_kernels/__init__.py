"""Matrix products on one GPU or on the CPU: one kernel a file, all with `prepare`, `multiply` and `finish`.

Importing this package initialises neither CUDA nor Numba. A kernel's modules are imported when it is selected.
"""

from __future__ import annotations

from distmm_kernels.launch import cache as _cache

_cache.sources()

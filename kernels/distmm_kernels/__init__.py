"""Matrix products on one GPU or on the CPU: kernels, one idea a file, behind three verbs.

Importing this package touches neither CUDA nor Numba; a kernel's modules are imported when it is selected.
"""

from __future__ import annotations

"""What a process imports whose forks compile kernels: the compilers, and the device code of most kernels."""

from __future__ import annotations

from distmm_kernels.device_code import (
    emit,
    fragments,  # noqa: F401
    largest,  # noqa: F401
    mma,  # noqa: F401
    reconstruct,  # noqa: F401
    register_tiled,  # noqa: F401
    residues,  # noqa: F401
    thin_products,  # noqa: F401
)
from distmm_kernels.device_code.copies import prepass, transpose  # noqa: F401
from distmm_kernels.device_code.hopper import hopper_gemm  # noqa: F401

emit.preload()

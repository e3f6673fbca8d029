"""NVIDIA's cuBLAS through CuPy: the peer that the ladder is measured against, chosen by name only."""

from __future__ import annotations

import os

from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch.launches import CudaKernel

__all__ = ["CublasKernel"]


class CublasKernel(CudaKernel):
    """IEEE operands and accumulation in the library's own order of additions: no promise about cuts of k."""

    name = "cublas"
    granule = None

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        # CuPy reads this variable and then rounds float32 operands to 10 bits
        if os.environ.get("CUPY_TF32", "0") not in ("", "0"):
            raise ValueError("CUPY_TF32 is set, so cuBLAS would round float32 operands to TF32: unset it")

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        cupy = self._module
        cupy.matmul(a, b, out=d)
        if c is not None:
            cupy.add(c, d, out=d)

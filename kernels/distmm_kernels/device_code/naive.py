"""One thread computes one element of C, with all operands from global memory: 2k loads for each element.

This is the baseline. Neighbouring threads of a warp read neighbouring columns of B in one transaction and the
same element of A by broadcast, so the caches hide much of what the count of loads suggests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distmm_kernels.device_code.arithmetic import multiply_add
from distmm_kernels.device_code.emit import cuda
from distmm_kernels.device_code.tiled import source_of
from distmm_kernels.launch.compiler import Source


def naive(dtype: np.dtype[Any], tile: int) -> Callable[..., None]:
    """Make the kernel for a dtype; thread blocks compute ``tile`` x ``tile`` elements, numbered as in `tiled`."""
    fma, zero = multiply_add(dtype), dtype.type(0)

    def kernel(a, b, c, d):
        columns = (d.shape[2] + tile - 1) // tile
        batch = cuda.blockIdx.y
        i = cuda.blockIdx.x // columns * tile + cuda.threadIdx.x // tile
        j = cuda.blockIdx.x % columns * tile + cuda.threadIdx.x % tile
        if i < d.shape[1] and j < d.shape[2]:
            acc = c[batch, i, j] if c.shape[0] > 0 else zero
            k = 0
            while k < a.shape[2]:  # 6 instructions a step; with `for k in range(...)` Numba's iterator makes it 19
                acc = fma(acc, a[batch, i, k], b[batch, k, j])
                k += 1
            d[batch, i, j] = acc

    return kernel


def source(dtype: str, tile: int) -> Source:
    """Return the source that `distmm_kernels.launch.binary` compiles."""
    return source_of(naive(np.dtype(dtype), tile), dtype, tile)

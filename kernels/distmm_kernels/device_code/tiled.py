"""A thread block computes a tile of C. In each step along k, its threads share one tile of A and one of B.

Each thread loads one element of both tiles, so an element of C costs 2k / 32 global loads instead of 2k. Loads are
guarded: outside of the matrix they give zero. Each tile has its own condition, and no condition contains a barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distmm_kernels.device_code.arithmetic import multiply_add
from distmm_kernels.device_code.emit import cuda, from_dtype, types
from distmm_kernels.launch.compiler import Source


def tiled(dtype: np.dtype[Any], tile: int) -> Callable[..., None]:
    """Make the kernel for a dtype; tiles of A, B and C are ``tile`` x ``tile``. If ``c`` has no matrices, C is zero.

    ``blockIdx.x`` counts the tiles of one C in row-major order, since a tall C has more rows of tiles than
    ``gridDim.y`` may count; ``blockIdx.y`` is the matrix in the stack. Threads are numbered along the rows of a tile.

    Steps of k are added one by one in ascending order to the element of C that the thread starts from, so the
    result does not depend on how k is split into calls, if each split is at a multiple of ``tile``.
    """
    fma = multiply_add(dtype)
    number = from_dtype(dtype)
    zero = dtype.type(0)

    def kernel(a, b, c, d):
        m, n, depth = d.shape[1], d.shape[2], a.shape[2]
        tile_a = cuda.shared.array((tile, tile), number)
        tile_b = cuda.shared.array((tile, tile), number)
        columns = (n + tile - 1) // tile
        batch = cuda.blockIdx.y
        row, column = cuda.threadIdx.x // tile, cuda.threadIdx.x % tile
        i = cuda.blockIdx.x // columns * tile + row
        j = cuda.blockIdx.x % columns * tile + column

        inside = i < m and j < n
        acc = c[batch, i, j] if inside and c.shape[0] > 0 else zero
        for k0 in range(0, depth, tile):
            tile_a[row, column] = a[batch, i, k0 + column] if i < m and k0 + column < depth else zero
            tile_b[row, column] = b[batch, k0 + row, j] if j < n and k0 + row < depth else zero
            cuda.syncthreads()
            for k in range(tile):
                acc = fma(acc, tile_a[row, k], tile_b[k, column])
            cuda.syncthreads()  # otherwise a fast thread overwrites the tile that a slow one still reads
        if inside:
            d[batch, i, j] = acc

    return kernel


def source(dtype: str, tile: int) -> Source:
    """Return the source that `distmm_kernels.launch.binary` compiles."""
    return source_of(tiled(np.dtype(dtype), tile), dtype, tile)


def source_of(kernel: Callable[..., None], dtype: str, tile: int) -> Source:
    """Return the source of a kernel ``(a, b, c, d)`` on stacks with any strides, with a thread for each element."""
    stack = types.Array(from_dtype(np.dtype(dtype)), 3, "A")
    # no bound of registers: it costs 15 % on an H200, and 1024 threads fit without it (tests check that)
    return Source(kernel, types.void(stack, stack, stack, stack), tile * tile, blocks=0)

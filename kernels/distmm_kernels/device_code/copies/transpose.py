"""Copy a matrix whose columns are contiguous to one whose rows are.

A tile in shared memory is transposed, so that a warp reads contiguous elements and writes contiguous elements.
"""

from __future__ import annotations

import numpy as np
from numpy import uint32

from distmm_kernels.device_code.emit import cuda, from_dtype, types
from distmm_kernels.launch.compiler import Source
from distmm_kernels.layout.copies import TILE

int64 = types.int64

ROWS = TILE // 4  # rows of a tile that a thread block reads at a time


def source(dtype: str) -> Source:
    """Return the kernel ``(a, out)`` on stacks ``(batch, m, n)``; columns of ``out`` beyond those of ``a`` become 0."""
    number, zero = from_dtype(np.dtype(dtype)), np.dtype(dtype).type(0)
    tile, pitch = uint32(TILE), TILE + 1  # one more: otherwise a column of the tile would be in one bank

    def transpose(a, out):
        held = cuda.shared.array((TILE, pitch), number)
        thread, batch = uint32(cuda.threadIdx.x), cuda.blockIdx.y
        x, y = int64(thread % tile), int64(thread // tile)
        wide = uint32((out.shape[2] + TILE - 1) // TILE)
        i0 = int64(uint32(cuda.blockIdx.x) // wide) * TILE
        j0 = int64(uint32(cuda.blockIdx.x) % wide) * TILE
        if i0 + TILE <= a.shape[1] and j0 + TILE <= a.shape[2]:
            # issue four loads before waiting for the first
            first, second = a[batch, i0 + x, j0 + y], a[batch, i0 + x, j0 + y + ROWS]
            third, fourth = a[batch, i0 + x, j0 + y + 2 * ROWS], a[batch, i0 + x, j0 + y + 3 * ROWS]
            held[y, x], held[y + ROWS, x] = first, second
            held[y + 2 * ROWS, x], held[y + 3 * ROWS, x] = third, fourth
        else:
            for s in range(0, TILE, ROWS):
                inside = i0 + x < a.shape[1] and j0 + y + s < a.shape[2]
                held[y + s, x] = a[batch, i0 + x, j0 + y + s] if inside else zero
        cuda.syncthreads()
        for s in range(0, TILE, ROWS):
            if i0 + y + s < out.shape[1] and j0 + x < out.shape[2]:
                out[batch, i0 + y + s, j0 + x] = held[x, y + s]

    stack = types.Array(number, 3, "A")
    return Source(transpose, types.void(stack, stack), TILE * ROWS, blocks=2048 // (TILE * ROWS))

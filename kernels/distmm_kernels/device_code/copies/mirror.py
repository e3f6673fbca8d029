"""Overwrite square matrices above the diagonal by the mirror image of what lies below it, as `symmetric.mirror` does.

A thread block reads one tile on or below the diagonal, and writes it transposed, so that a warp reads and writes
contiguous elements.
"""

from __future__ import annotations

import numpy as np
from numpy import uint32

from distmm_kernels.device_code.emit import cuda, from_dtype, i64, types
from distmm_kernels.launch.compiler import Source
from distmm_kernels.layout.copies import TILE

ROWS = TILE // 4  # rows of a tile that a thread block reads at a time


def source(dtype: str, hermitian: bool) -> Source:
    """Return the kernel ``(d)`` on stacks ``(batch, n, n)``. Grid: tiles on and below the diagonal, matrices, 1."""
    number, tile = from_dtype(np.dtype(dtype)), uint32(TILE)
    pitch = TILE + 1  # one more: otherwise a column of the tile would be in one bank

    def mirror(d):
        held = cuda.shared.array((TILE, pitch), number)
        thread, batch, n = uint32(cuda.threadIdx.x), cuda.blockIdx.y, d.shape[1]
        x, y = i64(thread % tile), i64(thread // tile)
        # row i has i + 1 tiles: a long row and a short one together have as many as any other two
        high = uint32((n + TILE - 1) // TILE)
        even = uint32(1) - high % uint32(2)
        pair, place = uint32(cuda.blockIdx.x) // (high + even), uint32(cuda.blockIdx.x) % (high + even)
        long = place < high - pair
        i0 = i64(high - uint32(1) - pair if long else pair + even - uint32(1)) * TILE
        j0 = i64(place if long else place - (high - pair)) * TILE
        for s in range(0, TILE, ROWS):
            if i0 + y + s < n and j0 + x < n:
                held[y + s, x] = d[batch, i0 + y + s, j0 + x]
        cuda.syncthreads()
        for s in range(0, TILE, ROWS):
            row, column = j0 + y + s, i0 + x
            if column < n and row < column:
                value = held[x, y + s]
                d[batch, row, column] = value.conjugate() if hermitian else value
            if hermitian and row == column and row < n:
                d[batch, row, column] = held[x, y + s].real

    return Source(mirror, types.void(types.Array(number, 3, "A")), TILE * ROWS, blocks=2048 // (TILE * ROWS))

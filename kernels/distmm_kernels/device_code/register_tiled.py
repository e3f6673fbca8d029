"""A thread owns 8 x 16 elements of C in registers: what it loads from shared memory serves 8 or 16 multiply-adds.

`tiled` needs two loads from shared memory for one multiply-add, and waits for them. Here a step of k is an outer
product: 8 elements of A and 16 of B, six vector loads in all, give 128 multiply-adds, and the loads of the next step
are under way meanwhile. Tiles lie in shared memory with k first. They come as asynchronous copies of 16 bytes, a few
stages ahead and past the registers, so that next to nothing but multiply-adds is left for the threads to do. For that
`prepare` brings operands into memory with k first. `distmm_kernels.tiling` computes which thread does what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, cuda, from_dtype, int32, int64, types
from numpy import uint32

from distmm_kernels.compiler import Source
from distmm_kernels.device_code.unrolled import address, close_stage, copy, load, multiply, store, wait_for_stages
from distmm_kernels.tiling import WARP, Tiling, lane_place

__all__ = ["register_tiled", "source"]

# Blocks that run at the same time should share rows of A and columns of B in the second-level cache: they are numbered
# down this many rows of tiles before they go on to the next column of tiles. 4 to 64 differ by under 3 % on an H200.
GROUP = uint32(16)

ALIGNMENT = None if config.ENABLE_CUDASIM else 16  # of shared memory, for vectors; the simulator refuses the argument


def register_tiled(dtype: np.dtype[Any], tiling: Tiling, width: int) -> Callable[..., None]:
    """Make the kernel ``(a, b, c, d)`` for a dtype.

    A is given as ``(batch, k, m)``, B as ``(batch, k, n)``, each with rows of unit stride that begin at multiples of 16
    bytes. A stack ``c`` of no matrices stands for zero. Steps of k are added one by one in ascending order to the
    elements of C that a thread starts from, so the result does not depend on how k is cut into calls.

    Parameters
    ----------
    width
        Elements of the vectors that D is stored in.
    """
    number = from_dtype(dtype)
    place = lane_place if config.ENABLE_CUDASIM else cuda.jit(device=True, inline="always")(lane_place)
    rows, columns, depth, stages = tiling.rows, tiling.columns, tiling.depth, tiling.stages
    start = address()
    copy_a = copy(tiling.copies(rows), rows, tiling.vector)
    copy_b = copy(tiling.copies(columns), columns, tiling.vector)
    close, wait = close_stage(), wait_for_stages(stages - 2)
    begin, multiply_most, multiply_last = (multiply(tiling, *s) for s in ((-1, 0), (0, depth - 1), (depth - 1, depth)))
    load_c, store_d = load(tiling.outputs(1)), store(tiling.outputs(width), width)

    size_a, size_b = int32(depth * rows), int32(depth * columns)
    all_a, all_b = stages * depth * rows, stages * depth * columns
    outputs, operands = tiling.thread_rows * tiling.thread_columns, 2 * (tiling.thread_rows + tiling.thread_columns)
    # unsigned: Numba gives signed divisions Python's rounding, and mixes int64 with uint64 into floats
    warp_size, warp_rows, vector = uint32(WARP[0] * WARP[1]), uint32(tiling.warp_rows), uint32(tiling.vector)
    warp_height, warp_width = uint32(WARP[0] * tiling.thread_rows), uint32(WARP[1] * tiling.thread_columns)
    lanes_a, lanes_b = uint32(tiling.lanes(rows)), uint32(tiling.lanes(columns))
    first, one, last = int32(0), int32(1), int32(stages - 1)
    zero = dtype.type(0)

    def kernel(a, b, c, d):
        m, n, steps = d.shape[1], d.shape[2], a.shape[1]
        tile_a = cuda.shared.array(all_a, number, ALIGNMENT)
        tile_b = cuda.shared.array(all_b, number, ALIGNMENT)
        acc = cuda.local.array(outputs, number)
        held = cuda.local.array(operands, number)
        thread, batch = uint32(cuda.threadIdx.x), cuda.blockIdx.y

        # the block's tile of C: groups of GROUP rows of tiles, the last one as high as is left
        high, wide = uint32((m + rows - 1) // rows), uint32((n + columns - 1) // columns)
        block = uint32(cuda.blockIdx.x)
        above = uint32(block // uint32(GROUP * wide) * GROUP)
        height = uint32(min(GROUP, high - above))
        in_group = uint32(block - above * wide)
        i0, j0 = int64(above + in_group % height) * rows, int64(in_group // height) * columns
        inside = i0 + rows <= m and j0 + columns <= n

        # the thread's first element of C in the tile
        warp = uint32(thread // warp_size)
        lane_row, lane_column = place(uint32(thread % warp_size))
        i = int32(warp % warp_rows * warp_height + uint32(lane_row) * vector)
        j = int32(warp // warp_rows * warp_width + uint32(lane_column) * vector)

        # the thread's vectors of the operands; beyond the last column it reads that: what comes of it is not stored
        k_a, i_a = int32(thread // lanes_a), int32(thread % lanes_a * vector)
        k_b, j_b = int32(thread // lanes_b), int32(thread % lanes_b * vector)
        into_a, into_b = int32(k_a * rows + i_a), int32(k_b * columns + j_b)
        from_a, from_b = min(i0 + i_a, (m - 1) // vector * vector), min(j0 + j_b, (n - 1) // vector * vector)
        next_a, next_b = start(a, batch, k_a, from_a), start(b, batch, k_b, from_b)
        stride_a, stride_b = a.strides[1] * depth, b.strides[1] * depth

        k = 0  # of the next tiles to come
        for stage in range(last):
            copy_a(tile_a, stage * size_a + into_a, a, batch, k + k_a, from_a, next_a)
            copy_b(tile_b, stage * size_b + into_b, b, batch, k + k_b, from_b, next_b)
            close()
            k, next_a, next_b = k + depth, next_a + stride_a, next_b + stride_b
        if c.shape[0] > 0:
            load_c(acc, c, batch, i0 + i, j0 + j, inside)
        else:
            for e in range(outputs):
                acc[e] = zero
        wait()
        cuda.syncthreads()

        now, free = first, last
        begin(acc, held, tile_a, i, tile_b, j)
        steps += k
        while k < steps:
            copy_a(tile_a, free * size_a + into_a, a, batch, k + k_a, from_a, next_a)
            copy_b(tile_b, free * size_b + into_b, b, batch, k + k_b, from_b, next_b)
            close()
            k, next_a, next_b = k + depth, next_a + stride_a, next_b + stride_b
            multiply_most(acc, held, tile_a, now * size_a + i, tile_b, now * size_b + j)
            free = now
            now = int32(now + one) if now < last else first
            wait()
            cuda.syncthreads()  # the next tiles are complete, and nobody reads these any more
            multiply_last(acc, held, tile_a, now * size_a + i, tile_b, now * size_b + j)
        store_d(acc, d, batch, i0 + i, j0 + j, inside)

    return kernel


def source(dtype: str, tiling: Tiling, width: int) -> Source:
    """Return what `distmm_kernels.binary` compiles."""
    stack = types.Array(from_dtype(np.dtype(dtype)), 3, "A")
    function = register_tiled(np.dtype(dtype), tiling, width)
    return Source(function, types.void(stack, stack, stack, stack), tiling.threads, tiling.blocks)

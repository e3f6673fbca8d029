"""A thread owns 8 x 16 elements of C in registers, so each element loaded from shared memory serves 8 or 16 products.

`tiled` needs two loads from shared memory for one multiply-add, and waits for them. Here a step of k is an outer
product: six vector loads bring 8 elements of A and 16 of B, which give 128 multiply-adds. The loads of the next step
overlap with them. In shared memory, k is the first axis of a tile. Asynchronous copies of 16 bytes, which bypass
registers, load tiles a few pipeline stages ahead, so that threads execute little else than multiply-adds. For these
copies, `prepare` makes operands whose first axis is k. `distmm_kernels.tiles.tiling` assigns the work to threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import uint32

from distmm_kernels.device_code import unrolled as operations
from distmm_kernels.device_code.emit import cuda, from_dtype, i32, i64, inlined, types
from distmm_kernels.launch.compiler import Source
from distmm_kernels.tiles.tiling import Tiling

# Blocks that run at the same time should share rows of A and columns of B in the L2 cache. So blocks are numbered down
# this many rows of tiles, then continue in the next column of tiles. 4 to 64 differ by under 3 % on an H200.
GROUP = uint32(16)

ALIGNMENT = 16  # of shared memory, for vectors

# The largest static shared memory of a block. A launch must request more explicitly.
MOST_STATIC = 48 * 1024


def register_tiled(
    dtype: np.dtype[Any],
    tiling: Tiling,
    width: int,
    multiply: Callable[..., Any],
    narrow: np.dtype[Any] | None = None,
    modulo: bool = False,
) -> Callable[..., None]:
    """Make the kernel ``(a, b, c, d)`` for a dtype, or ``(a, a_low, b, b_low, c, d, of_rows, of_columns)`` for halves.

    A is given as ``(batch, k, m)``, B as ``(batch, k, n)``. Rows have unit stride, or columns where the tiling has the
    operand along k, and begin at multiples of 16 bytes. If ``c`` is a stack of no matrices, C is zero. A thread
    starts from elements of C, and adds the steps of k one by one in ascending order. So the result does not depend on
    how k is split into calls.

    Halves are two matrices for each operand, with the same strides. Each element of their product is multiplied by its
    element of ``of_rows``, then by that of ``of_columns``. Stacks of no matrices mean a factor of one.

    Parameters
    ----------
    width
        Elements of the vectors that store D.
    multiply
        Makes the function that multiplies the steps of a tile, as `unrolled.multiply` does.
    narrow
        Type of A and B, if it is not ``dtype``. Then a thread holds operands in registers of 32 bits. C has the
        strides of D, and is added after all products.
    modulo
        Whether sums are reduced after all products: D has the bytes of their residues. ``c`` then has the moduli, as
        `unrolled.reduce` reads them.
    """
    number, c_last = from_dtype(dtype), narrow is not None
    element, register = (number, number) if narrow is None else (from_dtype(narrow), types.uint32)
    place = inlined(tiling.place)
    rows, columns, depth, stages = tiling.rows, tiling.columns, tiling.depth, tiling.stages
    (share_a, beside_a, start_a, copy_a), (share_b, beside_b, start_b, copy_b) = (_operand(tiling, i) for i in (0, 1))
    close, wait = operations.close_stage(), operations.wait_for_stages(stages - 2)
    last_step = depth // tiling.step - 1
    parts = (-1, 0), (0, last_step), (last_step, last_step + 1)
    begin, multiply_most, multiply_last = (multiply(tiling, *part) for part in parts)
    load_c, store_d = operations.load(tiling.outputs(1)), operations.store(tiling.outputs(width), width)
    halves = tiling.parts == 2
    scale = operations.scale(tiling.outputs(1))

    size_a, size_b = (i32(tiling.stage_elements(i)) for i in (0, 1))
    all_a, all_b, first_b = int(stages * size_a), int(stages * size_b), i32(0)
    if dynamic_bytes(tiling):  # then both arrays are the dynamic shared memory, and B's tiles follow A's
        all_a, all_b, first_b = 0, 0, i32(all_a)
    low_a, low_b = (i32(tiling.part_elements(i)) for i in (0, 1))
    outputs, operands = tiling.thread_rows * tiling.thread_columns, tiling.operands
    finish_with_c = operations.reduce(outputs) if modulo else operations.add(tiling.outputs(width), width)
    # unsigned: Numba rounds signed divisions as Python does, and converts int64 with uint64 to floats
    warp_size, warp_rows = uint32(32), uint32(tiling.warp_rows)
    warp_height, warp_width = map(uint32, tiling.part)
    run_rows, run_columns = map(uint32, tiling.runs)
    begin_a, begin_b = (inlined(tiling.first_read(operand)) for operand in (0, 1))
    first, one, last, origin = i32(0), i32(1), i32(stages - 1), i64(0)
    zero = dtype.type(0)

    def product(a, a_low, b, b_low, c, d, of_rows, of_columns):
        m, n, steps = d.shape[1], d.shape[2], a.shape[1]
        tile_a = cuda.shared.array(all_a, element, ALIGNMENT)
        tile_b = cuda.shared.array(all_b, element, ALIGNMENT)
        acc = cuda.local.array(outputs, number)
        held = cuda.local.array(operands, register)
        thread, batch = uint32(cuda.threadIdx.x), cuda.blockIdx.y

        # the block's tile of C, in groups of GROUP rows of tiles; the last group may have fewer rows
        high, wide = uint32((m + rows - 1) // rows), uint32((n + columns - 1) // columns)
        block = uint32(cuda.blockIdx.x)
        above = uint32(block // uint32(GROUP * wide) * GROUP)
        height = uint32(min(GROUP, high - above))
        in_group = uint32(block - above * wide)
        i0, j0 = i64(above + in_group % height) * rows, i64(in_group // height) * columns
        inside = i0 + rows <= m and j0 + columns <= n

        # the thread's first element of C in the tile
        warp = uint32(thread // warp_size)
        lane_row, lane_column = place(uint32(thread % warp_size))
        warp_i, warp_j = uint32(warp % warp_rows * warp_height), uint32(warp // warp_rows * warp_width)
        i = i32(warp_i + uint32(lane_row) * run_rows)
        j = i32(warp_j + uint32(lane_column) * run_columns)

        # where the thread reads operands in a tile
        read_a = begin_a(warp_i, uint32(lane_row), uint32(lane_column))
        read_b = begin_b(warp_j, uint32(lane_row), uint32(lane_column)) + first_b

        # the thread's vectors of the operands; beyond the last column it reads the last one, and the results are not
        # stored
        k_a, i_a, into_a = share_a(thread)
        k_b, j_b, into_b = share_b(thread)
        into_b += first_b
        from_a, from_b = beside_a(i0 + i_a, m), beside_b(j0 + j_b, n)
        next_a, next_b = start_a(a, batch, k_a, from_a), start_b(b, batch, k_b, from_b)
        to_low_a = start_a(a_low, origin, origin, origin) - start_a(a, origin, origin, origin)
        to_low_b = start_b(b_low, origin, origin, origin) - start_b(b, origin, origin, origin)
        stride_a, stride_b = a.strides[1] * depth, b.strides[1] * depth

        k = 0  # of the next tiles to come
        for stage in range(last):
            into_stage_a, into_stage_b = stage * size_a + into_a, stage * size_b + into_b
            copy_a(tile_a, into_stage_a, a, batch, k + k_a, from_a, next_a)
            copy_b(tile_b, into_stage_b, b, batch, k + k_b, from_b, next_b)
            if halves:
                copy_a(tile_a, into_stage_a + low_a, a_low, batch, k + k_a, from_a, next_a + to_low_a)
                copy_b(tile_b, into_stage_b + low_b, b_low, batch, k + k_b, from_b, next_b + to_low_b)
            close()
            k, next_a, next_b = k + depth, next_a + stride_a, next_b + stride_b
        if not c_last and c.shape[0] > 0:
            load_c(acc, c, batch, i0 + i, j0 + j, inside)
        else:
            for e in range(outputs):
                acc[e] = zero
        wait()
        cuda.syncthreads()

        now, free = first, last
        begin(acc, held, tile_a, read_a, tile_b, read_b)
        steps += k
        while k < steps:
            into_stage_a, into_stage_b = free * size_a + into_a, free * size_b + into_b
            copy_a(tile_a, into_stage_a, a, batch, k + k_a, from_a, next_a)
            copy_b(tile_b, into_stage_b, b, batch, k + k_b, from_b, next_b)
            if halves:
                copy_a(tile_a, into_stage_a + low_a, a_low, batch, k + k_a, from_a, next_a + to_low_a)
                copy_b(tile_b, into_stage_b + low_b, b_low, batch, k + k_b, from_b, next_b + to_low_b)
            close()
            k, next_a, next_b = k + depth, next_a + stride_a, next_b + stride_b
            multiply_most(acc, held, tile_a, now * size_a + read_a, tile_b, now * size_b + read_b)
            free = now
            now = i32(now + one) if now < last else first
            wait()
            cuda.syncthreads()  # the next tiles are complete, and no thread reads the old ones any more
            multiply_last(acc, held, tile_a, now * size_a + read_a, tile_b, now * size_b + read_b)
        if halves and of_rows.shape[0] > 0:
            scale(acc, of_rows, batch, i0 + i, j0 + j, inside)
            scale(acc, of_columns, batch, i0 + i, j0 + j, inside)
        if c_last and c.shape[0] > 0:
            finish_with_c(acc, c, batch, i0 + i, j0 + j, inside)
        store_d(acc, d, batch, i0 + i, j0 + j, inside)

    if halves:
        return product
    product = inlined(product)

    def kernel(a, b, c, d):
        product(a, a, b, b, c, d, d, d)

    return kernel


def _operand(tiling: Tiling, operand: int) -> tuple[Callable[..., Any], ...]:
    """Make the four functions that load A (0) or B (1) into shared memory.

    ``share(thread)`` returns where the thread's first vector begins: the step of k, the row of A or column of B, and
    the position in the tile. ``beside(i, size)`` returns the row or column to read for ``i``. It is ``i``
    for k-major operands; otherwise it is at most the first element of the last vector. The other two functions are
    those of `unrolled.address` and `unrolled.copy`.
    """
    lanes, vector, place = uint32(tiling.lanes(operand)), uint32(tiling.vector), inlined(tiling.vector_place(operand))

    def share(thread):
        row, number = uint32(thread // lanes), uint32(thread % lanes)
        return i32(row), i32(number * vector), place(row, number)

    def share_along_k(thread):
        row, number = uint32(thread // lanes), uint32(thread % lanes)
        return i32(number * vector), i32(row), place(row, number)

    def last_or(i, size):
        return min(i, (size - 1) // vector * vector)

    def any_of(i, size):
        return i

    copies = tiling.copies(operand), tiling.pitch(operand)
    if tiling.along_k[operand]:
        made, moves = (share_along_k, any_of), (operations.address(0), operations.copy_along_k(*copies))
    else:
        made, moves = (share, last_or), (operations.address(), operations.copy(*copies, tiling.vector))
    return *(inlined(each) for each in made), *moves


def dynamic_bytes(tiling: Tiling) -> int:
    """Return the bytes of dynamic shared memory that a launch must request."""
    return tiling.shared_bytes if tiling.shared_bytes > MOST_STATIC else 0


def source(dtype: str, tiling: Tiling, width: int) -> Source:
    """Return the source that `distmm_kernels.launch.binary` compiles."""
    return source_of(register_tiled(np.dtype(dtype), tiling, width, operations.multiply), dtype, tiling)


def source_of(
    kernel: Callable[..., None], dtype: str, tiling: Tiling, narrow: str | None = None, modulo: bool = False
) -> Source:
    """Return the source of a kernel that `register_tiled` made."""
    operand, result = (types.Array(from_dtype(np.dtype(name)), 3, "A") for name in (narrow or dtype, dtype))
    more = tiling.parts - 1
    operands, scales = [operand] * 2 * tiling.parts, [result] * 2 * more
    signature = types.void(*operands, result, operand if modulo else result, *scales)
    return Source(kernel, signature, tiling.threads, tiling.blocks, dynamic_bytes(tiling))

"""A thread owns 8 x 16 elements of C in registers: what it loads from shared memory serves 8 or 16 multiply-adds.

`tiled` needs two loads from shared memory for one multiply-add, and waits for them. Here a step of k is an outer
product: 8 elements of A and 16 of B, six vector loads in all, give 128 multiply-adds. Tiles lie in shared memory with k
first, A transposed on the way in, so that both come as vectors; there are two of each, and the next ones travel from
global memory through registers while these are multiplied. `distmm_kernels.tiling` computes which thread does what.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, cuda, from_dtype, int32, int64, types
from numpy import uint32

from distmm_kernels import launch
from distmm_kernels.device_code.unrolled import load, multiply, store, store_shared
from distmm_kernels.kernel import Array
from distmm_kernels.tiling import TILINGS, WARP, Access, Tiling, access

__all__ = ["RegisterTiledKernel", "register_tiled"]

# Blocks that run at the same time should share rows of A and columns of B in the second-level cache: they are numbered
# down this many rows of tiles before they go on to the next column of tiles. 4 to 64 differ by under 3 % on an H200.
GROUP = uint32(16)

ALIGNMENT = None if config.ENABLE_CUDASIM else 16  # of shared memory, for vectors; the simulator refuses the argument


def register_tiled(dtype: np.dtype[Any], tiling: Tiling, by_a: Access, by_b: Access, width: int) -> Callable[..., None]:
    """Make the kernel for a dtype.

    Steps of k are added one by one in ascending order to the elements of C that a thread starts from, so the result
    does not depend on how k is cut into calls.

    Parameters
    ----------
    by_a, by_b
        How A and B may be loaded.
    width
        Elements of the vectors that C is stored in.
    """
    number = from_dtype(dtype)
    fetch_a, fetch_b = tiling.fetch_a(by_a), tiling.fetch_b(by_b)
    a_along_k, b_along_k = by_a.axis == 1, by_b.axis == 0
    load_a = load(fetch_a.offsets, by_a.axis, by_a.width)
    load_b = load(fetch_b.offsets, by_b.axis, by_b.width)
    store_a = store_shared(fetch_a, tiling.pitch_a, a_along_k)
    store_b = store_shared(fetch_b, tiling.pitch_b, b_along_k)
    load_c = load(tiling.outputs(1), 1, 1)
    store_d = store(tiling.outputs(width), width)
    depth, half = tiling.depth, tiling.depth // 2
    multiply_first, multiply_rest = multiply(tiling, 0, half), multiply(tiling, half, depth)

    rows, columns = tiling.rows, tiling.columns
    size_a, size_b = depth * tiling.pitch_a, depth * tiling.pitch_b
    staged = max(len(fetch_a.offsets) * by_a.width, len(fetch_b.offsets) * by_b.width)
    outputs = tiling.thread_rows * tiling.thread_columns
    both_a, both_b = 2 * size_a, 2 * size_b
    pitch_a, pitch_b = tiling.pitch_a, tiling.pitch_b
    # unsigned: Numba gives signed divisions Python's rounding, and mixes int64 with uint64 into floats
    warp_size, lanes_along = uint32(WARP[0] * WARP[1]), uint32(WARP[1])
    warp_rows, vector = uint32(tiling.warp_rows), uint32(tiling.vector)
    warp_height, warp_width = uint32(WARP[0] * tiling.thread_rows), uint32(WARP[1] * tiling.thread_columns)
    lanes_a, width_a, lanes_b, width_b = map(uint32, (fetch_a.lanes, by_a.width, fetch_b.lanes, by_b.width))

    def kernel(a, b, c, d):
        m, n, steps = d.shape[1], d.shape[2], a.shape[2]
        tile_a = cuda.shared.array(both_a, number, ALIGNMENT)
        tile_b = cuda.shared.array(both_b, number, ALIGNMENT)
        acc = cuda.local.array(outputs, number)
        stage = cuda.local.array(staged, number)
        thread, batch = uint32(cuda.threadIdx.x), cuda.blockIdx.y

        # the block's tile of C: groups of GROUP rows of tiles, the last one as high as is left
        high, wide = uint32((m + rows - 1) // rows), uint32((n + columns - 1) // columns)
        block = uint32(cuda.blockIdx.x)
        above = uint32(block // uint32(GROUP * wide) * GROUP)
        height = uint32(min(GROUP, high - above))
        place = uint32(block - above * wide)
        i0, j0 = int64(above + place % height) * rows, int64(place // height) * columns
        rows_inside, columns_inside = i0 + rows <= m, j0 + columns <= n

        # the thread's first element of C in the tile
        warp, lane = uint32(thread // warp_size), uint32(thread % warp_size)
        i = int32(warp % warp_rows * warp_height + lane // lanes_along * vector)
        j = int32(warp // warp_rows * warp_width + lane % lanes_along * vector)

        # the thread's first element of each operand's tile, and where that lies in shared memory
        fast_a, slow_a = int32(thread % lanes_a * width_a), int32(thread // lanes_a)
        fast_b, slow_b = int32(thread % lanes_b * width_b), int32(thread // lanes_b)
        i_a, k_a = (slow_a, fast_a) if a_along_k else (fast_a, slow_a)
        k_b, j_b = (fast_b, slow_b) if b_along_k else (slow_b, fast_b)
        into_a, into_b = int32(k_a * pitch_a + i_a), int32(k_b * pitch_b + j_b)

        load_c(acc, c, batch, i0 + i, j0 + j, rows_inside and columns_inside)
        full = depth <= steps
        load_a(stage, a, batch, i0 + i_a, k_a, rows_inside and full)
        store_a(stage, tile_a, into_a)
        load_b(stage, b, batch, k_b, j0 + j_b, columns_inside and full)
        store_b(stage, tile_b, into_b)
        cuda.syncthreads()

        k, now = 0, 0
        while k < steps:
            k += depth
            full = k + depth <= steps
            # each operand in its own half, so that both travel through the same registers
            if k < steps:
                load_a(stage, a, batch, i0 + i_a, k + k_a, rows_inside and full)
            multiply_first(acc, tile_a, now * size_a + i, tile_b, now * size_b + j)
            if k < steps:
                store_a(stage, tile_a, (1 - now) * size_a + into_a)
                load_b(stage, b, batch, k + k_b, j0 + j_b, columns_inside and full)
            multiply_rest(acc, tile_a, now * size_a + i, tile_b, now * size_b + j)
            if k < steps:
                store_b(stage, tile_b, (1 - now) * size_b + into_b)
            now = 1 - now
            cuda.syncthreads()  # the next tiles are complete, and nobody reads these any more
        store_d(acc, d, batch, i0 + i, j0 + j, rows_inside and columns_inside)

    return kernel


@functools.cache
def compiled(
    dtype: np.dtype[Any],
    tiling: Tiling,
    by_a: Access,
    by_b: Access,
    width: int,
    compute_capability: tuple[int, int],
) -> Any:
    """Compile the kernel for one type and one way of access, once a process and architecture (a few seconds)."""
    del compute_capability  # a key of the cache, as in `distmm_kernels.launch`
    stack = types.Array(from_dtype(dtype), 3, "A")
    # the simulator knows no bounds, and needs none
    bounds = {} if config.ENABLE_CUDASIM else {"launch_bounds": (tiling.threads, tiling.blocks)}
    function = register_tiled(dtype, tiling, by_a, by_b, width)
    return cuda.jit(types.void(stack, stack, stack, stack), **bounds)(function)


class RegisterTiledKernel(launch.CudaKernel):
    """Tiles in shared memory, and tiles of those in registers."""

    name = "register_tiled"

    @property
    def tiling(self) -> Tiling:
        """Sizes for this kernel's type."""
        return TILINGS[self.dtype.name]

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        tiling, stream = self.tiling, launch.current_stream()
        for stack in launch.matrices(a, b, launch.zero_if_none(c, d), d):
            views = [launch.view(array) for array in stack]
            by_a, by_b, _, by_d = (self._access(array) for array in views)
            width = by_d.width if by_d.axis == 1 else 1
            kernel = compiled(self.dtype, tiling, by_a, by_b, width, self.device.compute_capability)
            batch, m, n = stack[3].shape
            blocks = -(-m // tiling.rows) * -(-n // tiling.columns), batch
            kernel[blocks, tiling.threads, stream](*views)

    def _access(self, array: Any) -> Access:
        return access(array.shape, array.strides, launch.address(array), self.dtype.itemsize, self.tiling.vector)

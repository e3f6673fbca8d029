"""The Hopper kernel: a persistent, warp-specialised GEMM.

One block runs on each multiprocessor, and computes tiles of C in a loop. Its first thread, the producer, loads pipeline
stages of A and B (`loads`). Two warpgroups, the consumers, multiply the stages and store D (`multiplies`). mbarriers
signal which stages are full and which are empty (`ring`). While D is stored, the stages of the next tile are loaded.
"""

from __future__ import annotations

from distmm_kernels.device_code.emit import (
    TENSOR_MAP,
    cuda,
    dynamic_shared_memory,
    inlined,
    tensor_map_addresses,
    tensor_maps,
    types,
)
from distmm_kernels.device_code.hopper import instructions, pace
from distmm_kernels.device_code.hopper.loads import load_tiles
from distmm_kernels.device_code.hopper.multiplies import multiply_tiles
from distmm_kernels.device_code.hopper.ring import Ring, TileGrid, barriers_of, initialise
from distmm_kernels.launch.compiler import Source
from distmm_kernels.tiles.hopper_tiles import MOST_PANELS, ROWS, THREADS, HopperTile

int32, uint32, uint64 = types.int32, types.uint32, types.uint64

shared_memory = dynamic_shared_memory(alignment=1024)  # as the 128-byte swizzle requires


def hopper_gemm(tile: HopperTile) -> Source:
    """Make the kernel of a tile.

    The kernel's first parameters are six tensor maps: A, A's low part, B, B's low part, C and D. If operands have one
    part, the maps of the low parts are those of A and B again. If there is no C, its map is that of D. The other
    parameters are unsigned integers of 64 bits:

    row_scales, row_step, column_scales, column_step
        Addresses of float32 factors, and bytes from the factors of one matrix to those of the next. If D is int8, the
        first two give the address of the modulus of each matrix.
    m, n, k
        Sizes of one matrix.
    batch, a_step, b_step, c_step
        Number of matrices in the batch. A step is 1 if A (B, C) has a matrix for each, and 0 if it has one for all.
    high, wide
        Rows and columns of tiles of one C.
    counter
        Address of two uint32 in global memory, which are 0 before and after the launch: for the blocks' pace.
    above
        Rows of a symmetric product above the first row of D, which has rows and columns from the product's first on.

    If the tile is ``extended``, a seventh map is that of C0 (that of D, if there is no C0), and there are more
    parameters. If it has panels, the maps of A and of B are arrays of `MOST_PANELS`, and k is that of each panel but
    the last.

    alpha, beta
        The bits of float32 factors.
    c0_step
        The same as c_step, for C0.
    panels, last_k
        Number of panels, and the k of the last panel.
    """
    addresses_of, ring_barriers, set_up = tensor_map_addresses(6), barriers_of(tile), initialise(tile)
    addresses_of_seven = tensor_map_addresses(7)
    fewer, more = (instructions.set_registers(count, i == 1) for i, count in enumerate(tile.registers))
    load, multiply, panelled = load_tiles(tile), multiply_tiles(tile), tile.panels
    rounding = uint64(ROWS - 1)

    def run(maps, d, scales, finish, steps, m, n, k, batch, high_, wide_, counter, above):
        shared = shared_memory()
        full, empty = ring_barriers(shared)
        thread = uint32(cuda.threadIdx.x)
        # the compiler knows that it is the same in all threads of a warp, and keeps descriptors in uniform registers
        warpgroup = uint32(cuda.shfl_sync(0xFFFFFFFF, int32(thread >> uint32(7)), 0))
        set_up(thread, full, empty)

        ring = Ring(shared, full, empty)
        high, wide = uint32(high_), uint32(wide_)
        each = uint32(high * wide)
        total = uint32(each * uint32(batch))
        rows = uint32((m + rounding) // uint64(ROWS))
        grid, t = TileGrid(high, wide, each, total, rows, uint32(above)), uint32(cuda.blockIdx.x)
        if warpgroup == uint32(0):
            fewer()
            if thread == uint32(0):
                load(ring, grid, t, k, maps, steps, counter)
            # add no code here, and no barrier after the branch: with it, ptxas does not use the uniform datapath for
            # the loop's TMA instructions, and spills registers
        else:
            more()
            multiply(ring, grid, t, k, n, thread, warpgroup, d, scales, finish)
            if thread == uint32(THREADS - 1):
                pace.end(counter, uint32(cuda.gridDim.x) - uint32(1))

    run = inlined(run)

    def kernel(
        a, a_low, b, b_low, c, d, row_scales, row_step, column_scales, column_step,
        m, n, k, batch, a_step, b_step, c_step, high, wide, counter, above,
    ):  # fmt: skip
        a, a_low, b, b_low, c, d = addresses_of(a, a_low, b, b_low, c, d)
        scales, steps = (row_scales, row_step, column_scales, column_step), (a_step, b_step, c_step)
        run((a, a_low, b, b_low, c), d, scales, (), steps, m, n, uint32(k), batch, high, wide, counter, above)

    def extended(
        a, a_low, b, b_low, c, d, c0, row_scales, row_step, column_scales, column_step,
        m, n, k, batch, a_step, b_step, c_step, high, wide, counter, above, alpha, beta, c0_step, panels, last_k,
    ):  # fmt: skip
        a, a_low, b, b_low, c, d, c0 = addresses_of_seven(a, a_low, b, b_low, c, d, c0)
        scales, steps = (row_scales, row_step, column_scales, column_step), (a_step, b_step, c_step, c0_step)
        of_k = (uint32(k), uint32(panels), uint32(last_k)) if panelled else uint32(k)
        finish = alpha, beta
        run((a, a_low, b, b_low, c, c0), d, scales, finish, steps, m, n, of_k, batch, high, wide, counter, above)

    function, operand = extended if tile.extended else kernel, tensor_maps(MOST_PANELS) if tile.panels else TENSOR_MAP
    maps = [operand, TENSOR_MAP, operand, *[TENSOR_MAP] * (4 if tile.extended else 3)]
    signature = types.void(*maps, *[types.uint64] * (20 if tile.extended else 15))
    function.__name__ = f"hopper_{tile.operand}_{tile.output}_{tile.columns}x{tile.products}"  # what a profiler shows
    return Source(function, signature, THREADS, 1, tile.shared_bytes, specific=True)

"""The Hopper kernel: a persistent, warp-specialised GEMM.

One block runs on each multiprocessor, and computes tiles of C in a loop. Its first thread, the producer, loads pipeline
stages of A and B (`loads`). Two warpgroups, the consumers, multiply the stages and store D (`multiplies`). mbarriers
signal which stages are full and which are empty (`ring`). While D is stored, the stages of the next tile are loaded.
"""

from __future__ import annotations

from distmm_kernels.device_code import emit
from distmm_kernels.device_code.emit import cuda, i32, types, u32, u64
from distmm_kernels.device_code.hopper import instructions, pace
from distmm_kernels.device_code.hopper.loads import load_tiles
from distmm_kernels.device_code.hopper.multiplies import multiply_tiles
from distmm_kernels.device_code.hopper.ring import TileGrid, ring_of
from distmm_kernels.launch.compiler import Source
from distmm_kernels.tiles.hopper_tiles import MOST_PANELS, ROWS, THREADS, HopperTile

shared_memory = emit.dynamic_shared_memory(alignment=1024)  # as the 128-byte swizzle requires


def hopper_gemm(tile: HopperTile) -> Source:
    """Make the kernel of a tile.

    The kernel's first parameters are arrays of tensor maps, of A and of B: of both parts, or of all panels, or one map.
    The maps of C, D and C0 follow. Without a C or a C0, its map is that of D. The other parameters are unsigned
    integers of 64 bits:

    row_scales, row_step, column_scales, column_step
        Addresses of float32 factors, and bytes from the factors of one matrix to those of the next. If D is int8, the
        first two give the address of the modulus of each matrix.
    m, n, k
        Sizes of one matrix. If there are panels, k is that of each panel but the last.
    batch, a_step, b_step, c_step, c0_step
        Number of matrices in the batch. A step is 1 if A (B, C, C0) has a matrix for each, and 0 if it has one for all.
    high, wide
        Rows and columns of tiles of one C.
    counter
        Address of two uint32 in global memory, which are 0 before and after the launch: for the blocks' pace.
    above
        Rows of a symmetric product above the first row of D, which has rows and columns from the product's first on.
    alpha, beta
        The bits of float32 factors, for tiles that finish.
    panels, last_k
        Number of panels, and the k of the last panel.
    """
    addresses_of, set_up = emit.tensor_map_addresses(5), ring_of(tile)
    fewer, more = (instructions.set_registers(count, i == 1) for i, count in enumerate(tile.registers))
    load, multiply, panelled = load_tiles(tile), multiply_tiles(tile), tile.panels
    rounding = u64(ROWS - 1)

    def kernel(
        a, b, c, d, c0, row_scales, row_step, column_scales, column_step,
        m, n, k, batch, a_step, b_step, c_step, c0_step, high_, wide_, counter, above, alpha, beta, panels, last_k,
    ):  # fmt: skip
        a, b, c, d, c0 = addresses_of(a, b, c, d, c0)
        scales, steps = (row_scales, row_step, column_scales, column_step), (a_step, b_step, c_step, c0_step)
        of_k = (u32(k), u32(panels), u32(last_k)) if panelled else u32(k)
        shared = shared_memory()
        thread = u32(cuda.threadIdx.x)
        # the compiler knows that it is the same in all threads of a warp, and keeps descriptors in uniform registers
        warpgroup = u32(cuda.shfl_sync(0xFFFFFFFF, i32(thread >> u32(7)), 0))
        ring = set_up(shared, thread)

        high, wide = u32(high_), u32(wide_)
        each = u32(high * wide)
        total = u32(each * u32(batch))
        rows = u32((m + rounding) // u64(ROWS))
        grid, t = TileGrid(high, wide, each, total, rows, u32(above)), u32(cuda.blockIdx.x)
        if warpgroup == u32(0):
            fewer()
            if thread == u32(0):
                load(ring, grid, t, of_k, (a, b, c, c0), steps, counter)
            # add no code here, and no barrier after the branch: with it, ptxas does not use the uniform datapath for
            # the loop's TMA instructions, and spills registers
        else:
            more()
            multiply(ring, grid, t, of_k, n, thread, warpgroup, d, scales, (alpha, beta))
            if thread == u32(THREADS - 1):
                pace.end(counter, u32(cuda.gridDim.x) - u32(1))

    operand = emit.tensor_maps(MOST_PANELS if tile.panels else tile.parts)
    signature = types.void(operand, operand, *[emit.tensor_maps()] * 3, *[u64] * 20)
    kernel.__name__ = f"hopper_{tile.operand}_{tile.output}_{tile.columns}x{tile.products}"  # what a profiler shows
    return Source(kernel, signature, THREADS, 1, tile.shared_bytes, specific=True)

"""The Hopper kernel: a persistent, warp-specialised GEMM.

One block runs on each multiprocessor and takes tile after tile of C. Its first thread keeps a ring of stages of A and B
on their way into shared memory (TMA); two warpgroups multiply them (wgmma). A stage's *full* barrier says that it has
arrived, its *empty* barrier that all have read it. While one tile is stored, the next one's stages arrive.
"""

from __future__ import annotations

from numba import cuda, float32, int32, types, uint32, uint64

from distmm_kernels.compiler import Source
from distmm_kernels.device_code import barriers, tma, wgmma
from distmm_kernels.device_code.epilogue import load_c, scale, store_d
from distmm_kernels.hopper_tiles import CONSUMERS, GROUP, ROWS, SPAN, THREADS, WARP_ROWS, HopperTile, box_place, place

__all__ = ["hopper_gemm"]

SIGNATURE = types.void(*[tma.TENSOR_MAP] * 5, *[uint64] * 15)


def hopper_gemm(tile: HopperTile) -> Source:
    """Make the kernel of a tile.

    Its parameters are five tensor maps: A, A's low part, B, B's low part (the maps of the only parts again, where there
    is one product) and D; then, all unsigned and of 64 bits:

    c, pitch, c_step
        Address of C, bytes from one of its rows to the next, and from one matrix of the batch to the next.
    row_scales, row_step, column_scales, column_step
        Addresses of float32 factors, and bytes from one matrix's to the next one's.
    m, n, k
        Sizes of one matrix.
    batch, a_step, b_step
        Matrices in the batch; 1 where A (B) has as many, 0 where all of them use one.
    high, wide
        Rows and columns of tiles of one C.
    """
    # plain names: Numba's closures take numbers and functions, not the fields of a dataclass
    three, scaled, integer = tile.products == 3, tile.scaled, tile.output == "int32"
    start_from_c, add_c = tile.adds and not scaled, tile.adds and scaled
    a_along_k, b_along_k = tile.a_major == "k", tile.b_major == "k"
    columns, stages, steps = tile.columns, tile.stages, tile.depth // tile.instruction_depth
    accumulators, number = columns // 2, int32 if integer else float32
    rows, width, group, depth = uint32(ROWS), uint32(columns), uint32(GROUP), uint32(tile.depth)
    stage_bytes, a_bytes, b_bytes = uint32(tile.stage_bytes), uint32(tile.a_bytes), uint32(tile.b_bytes)
    b_offset = uint32(tile.parts * tile.a_bytes)
    chunk_columns, chunk_bytes = uint32(64), uint32(tile.depth * SPAN)  # of an operand that is not contiguous along k
    a_chunks, b_chunks = ROWS // 64, columns // 64
    warp_bytes = uint32(tile.slots * WARP_ROWS * SPAN)
    ring, staging = uint32(stages), uint32(stages * tile.stage_bytes)
    barrier_offset = uint32(stages * tile.stage_bytes + tile.staging_bytes)

    a_part, b_part = uint64(tile.a_bytes // 16), uint64(tile.b_bytes // 16)
    a_constant, b_constant = (uint64(wgmma.descriptor(along, tile.depth)) for along in (a_along_k, b_along_k))
    a_next, b_next = (wgmma.step(along, tile.instruction_depth) for along in (a_along_k, b_along_k))
    a_half = uint32(64 * SPAN if a_along_k else tile.depth * SPAN)  # from one warpgroup's rows of A to the other's

    maps, multiply = tma.map_addresses(5), wgmma.multiply(tile)
    clear, add, start = wgmma.clear(accumulators), wgmma.add(accumulators), load_c(columns, integer)
    rescale, wait_all, wait_but_last = scale(columns), wgmma.wait_for(0), wgmma.wait_for(1)
    fewer, more = (barriers.set_registers(count, i == 1) for i, count in enumerate(tile.registers))
    store = store_d(tile)
    # inlined by Numba itself: a call would be compiled for the current device, and there may be none
    inlined = cuda.jit(device=True, inline="always")
    tile_place, lane_place = inlined(place), inlined(box_place(tile.output))

    @inlined
    def load_stage(at, full, a, a_low, b, b_low, i, j, k, a_batch, b_batch):
        barriers.expect_bytes(full, stage_bytes)
        if a_along_k:
            tma.load_box(at, a, full, k, i, a_batch)
            if three:
                tma.load_box(at + a_bytes, a_low, full, k, i, a_batch)
        else:
            for chunk in range(a_chunks):
                there = uint32(chunk) * chunk_bytes
                tma.load_box(at + there, a, full, i + int32(uint32(chunk) * chunk_columns), k, a_batch)
                if three:
                    tma.load_box(
                        at + a_bytes + there, a_low, full, i + int32(uint32(chunk) * chunk_columns), k, a_batch
                    )
        to_b = at + b_offset
        if b_along_k:
            tma.load_box(to_b, b, full, k, j, b_batch)
            if three:
                tma.load_box(to_b + b_bytes, b_low, full, k, j, b_batch)
        else:
            for chunk in range(b_chunks):
                there = uint32(chunk) * chunk_bytes
                tma.load_box(to_b + there, b, full, j + int32(uint32(chunk) * chunk_columns), k, b_batch)
                if three:
                    tma.load_box(
                        to_b + b_bytes + there, b_low, full, j + int32(uint32(chunk) * chunk_columns), k, b_batch
                    )

    def kernel(
        a, a_low, b, b_low, d, c, pitch, c_step, row_scales, row_step, column_scales, column_step,
        m, n, k_, batch, a_step, b_step, high_, wide_,
    ):  # fmt: skip
        a, a_low, b, b_low, d = maps(a, a_low, b, b_low, d)
        shared = tma.shared_memory()
        full = shared + barrier_offset
        empty = full + uint32(8 * stages)
        thread = uint32(cuda.threadIdx.x)
        # the same in all threads of a warp, and known to be: descriptors and barriers then stay in uniform registers
        warpgroup = uint32(cuda.shfl_sync(0xFFFFFFFF, int32(thread >> uint32(7)), 0))
        if thread == uint32(0):
            for i in range(stages):
                barriers.initialise(full + uint32(8 * i), uint32(1))
                barriers.initialise(empty + uint32(8 * i), uint32(CONSUMERS))
            barriers.fence_barrier_init()
        cuda.syncthreads()

        high, wide = uint32(high_), uint32(wide_)
        tiles = uint32(high * wide)
        last, number_of_tiles = uint32(k_), uint32(tiles * uint32(batch))
        t = uint32(cuda.blockIdx.x)
        stage = uint32(0)
        if warpgroup == uint32(0):
            fewer()
            if thread == uint32(0):
                parity = uint32(1)
                while t < number_of_tiles:
                    z = uint32(t // tiles)
                    i, j = tile_place(uint32(t - z * tiles), high, wide, group)
                    k = uint32(0)
                    while k < last:
                        barriers.wait(empty + stage * uint32(8), parity)
                        load_stage(
                            shared + stage * stage_bytes, full + stage * uint32(8), a, a_low, b, b_low,
                            int32(i * rows), int32(j * width), int32(k),
                            int32(z * uint32(a_step)), int32(z * uint32(b_step)),
                        )  # fmt: skip
                        k += depth
                        stage += uint32(1)
                        if stage == ring:
                            stage = uint32(0)
                            parity ^= uint32(1)
                    t += uint32(cuda.gridDim.x)
            # nothing may follow here, nor a barrier after the branch: ptxas would take the loop's TMA instructions off
            # the uniform datapath, and spill
        else:
            more()
            acc = cuda.local.array(accumulators, number)
            totals = cuda.local.array(accumulators, number) if three else acc
            parity = uint32(0)
            half, warp, lane = warpgroup - uint32(1), (thread >> uint32(5)) & uint32(3), thread & uint32(31)
            warp_row = half * uint32(64) + warp * uint32(WARP_ROWS)
            buffers = shared + staging + ((thread >> uint32(5)) - uint32(4)) * warp_bytes
            at, permuted = lane_place(lane)
            while t < number_of_tiles:
                z = uint32(t // tiles)
                i, j = tile_place(uint32(t - z * tiles), high, wide, group)
                row, column = uint32(i * rows + warp_row), uint32(j * width)
                # the thread's first element of C
                my_row, my_column = uint32(row + lane // uint32(4)), uint32(column + lane % uint32(4) * uint32(2))
                left = int32(n) - int32(my_column)
                first_left = left if my_row < uint32(m) else int32(0)
                below_left = left if my_row + uint32(8) < uint32(m) else int32(0)
                c_at = c + uint64(z) * c_step + uint64(my_row) * pitch + uint64(my_column) * uint64(4)
                if start_from_c:
                    start(totals, c_at, pitch, first_left, below_left)
                else:
                    clear(totals)
                before = ring  # the stage whose products are still being added
                k = uint32(0)
                while k < last:
                    barriers.wait(full + stage * uint32(8), parity)
                    here = shared + stage * stage_bytes
                    a_tile = a_constant | uint64(((here + half * a_half) & uint32(0x3FFFF)) >> uint32(4))
                    b_tile = b_constant | uint64(((here + b_offset) & uint32(0x3FFFF)) >> uint32(4))
                    wgmma.fence()
                    if three:
                        for s in range(steps):
                            multiply(acc, a_tile + a_part + uint64(s * a_next), b_tile + uint64(s * b_next), s)
                        for s in range(steps):
                            multiply(acc, a_tile + uint64(s * a_next), b_tile + b_part + uint64(s * b_next), 1)
                        for s in range(steps):
                            multiply(acc, a_tile + uint64(s * a_next), b_tile + uint64(s * b_next), 1)
                        wgmma.commit()
                        wait_all()
                        if lane == uint32(0):
                            barriers.arrive(empty + stage * uint32(8))
                        add(totals, acc)
                    else:
                        for s in range(steps):
                            multiply(acc, a_tile + uint64(s * a_next), b_tile + uint64(s * b_next), 1)
                        wgmma.commit()
                        wait_but_last()
                        if lane == uint32(0) and before != ring:
                            barriers.arrive(empty + before * uint32(8))
                    before = stage
                    k += depth
                    stage += uint32(1)
                    if stage == ring:
                        stage = uint32(0)
                        parity ^= uint32(1)
                if not three:
                    wait_all()
                    if lane == uint32(0):
                        barriers.arrive(empty + before * uint32(8))
                if scaled:
                    rescale(
                        totals,
                        row_scales + uint64(z) * row_step + uint64(my_row) * uint64(4),
                        column_scales + uint64(z) * column_step + uint64(my_column) * uint64(4),
                    )
                    if add_c:
                        start(acc, c_at, pitch, first_left, below_left)
                        add(totals, acc)
                store(
                    totals,
                    buffers,
                    at,
                    permuted,
                    lane,
                    d,
                    int32(column),
                    int32(row),
                    int32(z),
                    int32(n) - int32(column),
                )
                t += uint32(cuda.gridDim.x)
            tma.wait_stores()

    kernel.__name__ = f"hopper_{tile.operand}_{tile.output}_{tile.columns}x{tile.products}"  # what a profiler shows
    return Source(kernel, SIGNATURE, THREADS, 1, tile.shared_bytes)

"""The Hopper kernel: a persistent, warp-specialised GEMM.

One block runs on each multiprocessor and takes tile after tile of C. Its first thread keeps a ring of stages of A and B
on their way into shared memory (TMA); two warpgroups multiply them (wgmma). A stage's *full* barrier says that it has
arrived, its *empty* barrier that all have read it. While one tile is stored, the next one's stages arrive. A tile of C
comes the same way, in stages of its own before those of A and B (after them where the product is scaled): read by the
warps from global memory it held the tensor cores up for 5.6 us a tile.

Where sums are taken out after each stage (three products), the warpgroups take turns: one multiplies while the other
adds. Left to themselves they fell into step now and then, and the tensor cores waited for both: 191 TFLOP/s instead of
229 (fp16x3, n = 16384).
"""

from __future__ import annotations

from numba import cuda, float32, int32, types, uint32, uint64

from distmm_kernels.compiler import Source
from distmm_kernels.device_code import barriers, stages, tma, wgmma
from distmm_kernels.device_code.epilogue import residue, scale, store_d
from distmm_kernels.hopper_tiles import CONSUMERS, GROUP, ROWS, SPAN, THREADS, WARP_ROWS, HopperTile, box_place, place

__all__ = ["hopper_gemm"]

SIGNATURE = types.void(*[tma.TENSOR_MAP] * 6, *[uint64] * 13)


def hopper_gemm(tile: HopperTile) -> Source:
    """Make the kernel of a tile.

    Its parameters are six tensor maps: A, A's low part, B, B's low part (the maps of the only parts again, where there
    is one product), C (that of D again, where there is none) and D; then, all unsigned and of 64 bits:

    row_scales, row_step, column_scales, column_step
        Addresses of float32 factors, and bytes from one matrix's to the next one's. Where D is int8, the first two
        say where the modulus of each matrix stands.
    m, n, k
        Sizes of one matrix.
    batch, a_step, b_step, c_step
        Matrices in the batch; 1 where A (B, C) has as many, 0 where all of them use one.
    high, wide
        Rows and columns of tiles of one C.
    """
    # plain names: Numba's closures take numbers and functions, not the fields of a dataclass
    three, scaled, reduced = tile.products == 3, tile.scaled, tile.output == "int8"
    start_from_c, add_c = tile.adds and not scaled, tile.adds and scaled
    a_along_k, b_along_k = tile.a_major == "k", tile.b_major == "k"
    columns, steps = tile.columns, tile.depth // tile.instruction_depth
    accumulators, number = columns // 2, int32 if tile.accumulator == "int32" else float32
    rows, width, group, depth = uint32(ROWS), uint32(columns), uint32(GROUP), uint32(tile.depth)
    stage_bytes, a_bytes, b_bytes = uint32(tile.stage_bytes), uint32(tile.a_bytes), uint32(tile.b_bytes)
    b_offset = uint32(tile.parts * tile.a_bytes)
    chunk_columns, chunk_bytes = uint32(64), uint32(tile.depth * SPAN)  # of an operand that is not contiguous along k
    warp_bytes = uint32(tile.slots * WARP_ROWS * SPAN)
    ring, staging = tile.stages, uint32(tile.stages * tile.stage_bytes)
    barrier_offset = uint32(tile.stages * tile.stage_bytes + tile.staging_bytes)

    a_part, b_part = uint64(tile.a_bytes // 16), uint64(tile.b_bytes // 16)
    a_constant, b_constant = (uint64(wgmma.descriptor(along, tile.depth)) for along in (a_along_k, b_along_k))
    a_next, b_next = (wgmma.step(along, tile.instruction_depth) for along in (a_along_k, b_along_k))
    a_half = uint32(64 * SPAN if a_along_k else tile.depth * SPAN)  # from one warpgroup's rows of A to the other's

    maps, multiply = tma.map_addresses(6), wgmma.multiply(tile)
    clear, add = wgmma.clear(accumulators), wgmma.add(accumulators)
    reduce = residue(columns)
    rescale, wait_all, wait_but_last = scale(columns), wgmma.wait_for(0), wgmma.wait_for(1)
    fewer, more = (barriers.set_registers(count, i == 1) for i, count in enumerate(tile.registers))
    store = store_d(tile)
    # inlined by Numba itself: a call would be compiled for the current device, and there may be none
    inlined = cuda.jit(device=True, inline="always")
    tile_place, lane_place, c_place = inlined(place), inlined(box_place(tile.output)), inlined(box_place("float32"))

    def loader(along_k, chunks):
        if along_k:
            return inlined(lambda at, matrix, full, i, k, z: tma.load_box(at, matrix, full, k, i, z))

        def load(at, matrix, full, i, k, z):
            for chunk in range(chunks):
                column = i + int32(uint32(chunk) * chunk_columns)
                tma.load_box(at + uint32(chunk) * chunk_bytes, matrix, full, column, k, z)

        return inlined(load)

    load_a, load_b = loader(a_along_k, ROWS // 64), loader(b_along_k, columns // 64)

    following, send_c, take_c = stages.following(tile), stages.send_c(tile), stages.take_c(tile)

    def kernel(
        a, a_low, b, b_low, c, d, row_scales, row_step, column_scales, column_step,
        m, n, k_, batch, a_step, b_step, c_step, high_, wide_,
    ):  # fmt: skip
        a, a_low, b, b_low, c, d = maps(a, a_low, b, b_low, c, d)
        shared = tma.shared_memory()
        full = shared + barrier_offset
        empty = full + uint32(8 * ring)
        thread = uint32(cuda.threadIdx.x)
        # the same in all threads of a warp, and known to be: descriptors and barriers then stay in uniform registers
        warpgroup = uint32(cuda.shfl_sync(0xFFFFFFFF, int32(thread >> uint32(7)), 0))
        if thread == uint32(0):
            for i in range(ring):
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
                    m0, n0, c_matrix = int32(i * rows), int32(j * width), int32(z * uint32(c_step))
                    if start_from_c:
                        stage, parity = send_c(shared, full, empty, stage, parity, c, n0, m0, c_matrix)
                    k = uint32(0)
                    while k < last:
                        barriers.wait(empty + stage * uint32(8), parity)
                        here, barrier = shared + stage * stage_bytes, full + stage * uint32(8)
                        k0 = int32(k)
                        barriers.expect_bytes(barrier, stage_bytes)
                        load_a(here, a, barrier, m0, k0, int32(z * uint32(a_step)))
                        load_b(here + b_offset, b, barrier, n0, k0, int32(z * uint32(b_step)))
                        if three:
                            load_a(here + a_bytes, a_low, barrier, m0, k0, int32(z * uint32(a_step)))
                            load_b(here + b_offset + b_bytes, b_low, barrier, n0, k0, int32(z * uint32(b_step)))
                        k += depth
                        stage, parity = following(stage, parity)
                    if add_c:
                        stage, parity = send_c(shared, full, empty, stage, parity, c, n0, m0, c_matrix)
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
            c_at, c_permuted = c_place(lane)
            c_at += warp_row * uint32(SPAN)
            mine, other = uint32(1) + half, uint32(2) - half
            if three and half == uint32(1):
                barriers.give_turn(other)
            while t < number_of_tiles:
                z = uint32(t // tiles)
                i, j = tile_place(uint32(t - z * tiles), high, wide, group)
                row, column = uint32(i * rows + warp_row), uint32(j * width)
                if start_from_c:
                    stage, parity = take_c(totals, shared, full, empty, stage, parity, c_at, c_permuted, lane)
                else:
                    clear(totals)
                before = uint32(ring)  # the stage whose products are still being added
                k = uint32(0)
                while k < last:
                    barriers.wait(full + stage * uint32(8), parity)
                    here = shared + stage * stage_bytes
                    a_tile = a_constant | uint64(((here + half * a_half) & uint32(0x3FFFF)) >> uint32(4))
                    b_tile = b_constant | uint64(((here + b_offset) & uint32(0x3FFFF)) >> uint32(4))
                    if three:
                        barriers.take_turn(mine)
                    wgmma.fence()
                    if three:
                        for s in range(steps):
                            multiply(acc, a_tile + a_part + uint64(s * a_next), b_tile + uint64(s * b_next), s)
                        for s in range(steps):
                            multiply(acc, a_tile + uint64(s * a_next), b_tile + b_part + uint64(s * b_next), 1)
                        for s in range(steps):
                            multiply(acc, a_tile + uint64(s * a_next), b_tile + uint64(s * b_next), 1)
                        wgmma.commit()
                        barriers.give_turn(other)
                        wait_all()
                        if lane == uint32(0):
                            barriers.arrive(empty + stage * uint32(8))
                        add(totals, acc)
                    else:
                        for s in range(steps):
                            multiply(acc, a_tile + uint64(s * a_next), b_tile + uint64(s * b_next), 1)
                        wgmma.commit()
                        wait_but_last()
                        if lane == uint32(0) and before != uint32(ring):
                            barriers.arrive(empty + before * uint32(8))
                    before = stage
                    k += depth
                    stage, parity = following(stage, parity)
                if not three:
                    wait_all()
                    if lane == uint32(0):
                        barriers.arrive(empty + before * uint32(8))
                if scaled:
                    # of the thread's first element
                    my_row, my_column = uint32(row + lane // uint32(4)), uint32(column + lane % uint32(4) * uint32(2))
                    rescale(
                        totals,
                        row_scales + uint64(z) * row_step + uint64(my_row) * uint64(4),
                        column_scales + uint64(z) * column_step + uint64(my_column) * uint64(4),
                    )
                    if add_c:
                        stage, parity = take_c(acc, shared, full, empty, stage, parity, c_at, c_permuted, lane)
                        add(totals, acc)
                if reduced:
                    reduce(totals, row_scales + uint64(z) * row_step)
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

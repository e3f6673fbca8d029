"""The consumers of the Hopper kernel: two warpgroups multiply pipeline stages with wgmma, and store tiles of D."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code.emit import cuda, f32, i32, inlined, u32, u64
from distmm_kernels.device_code.hopper import instructions, wgmma
from distmm_kernels.device_code.hopper.epilogue import add_scaled, load_factors
from distmm_kernels.device_code.hopper.finish import finish_of, last_step_of, scales_at, take_c_of
from distmm_kernels.device_code.hopper.ring import following, locate, slice_of
from distmm_kernels.device_code.hopper.stores import store_d
from distmm_kernels.tiles.hopper_places import box_place, mirrored_place, pairs_place
from distmm_kernels.tiles.hopper_tiles import ROWS, SPAN, WARP_ROWS, HopperTile


def multiply_tiles(tile: HopperTile) -> Callable[..., None]:
    """Make ``(ring, grid, t, k, n, thread, warpgroup, d, scales, factors)``: multiply, finish and store tiles.

    ``d`` is the address of D's tensor map; ``scales`` are the kernel's four parameters for scales. ``factors`` are
    alpha and beta, if the tile has them.
    """
    # plain names: Numba's closures take numbers and functions, not the fields of a dataclass
    turns, two_sets = tile.takes_turns, tile.two_sets
    accumulators, number = tile.columns // 2, i32 if tile.accumulator == "int32" else f32
    rows, columns = u32(ROWS), u32(tile.columns)
    staging, warp_bytes = u32(tile.stages * tile.stage_bytes), u32(tile.slots * WARP_ROWS * SPAN)
    d_place, c_place = inlined(box_place(tile.output)), inlined(box_place("float32"))
    clear, image_place = wgmma.clear(accumulators), inlined(mirrored_place(tile.output))
    c0_place = inlined(pairs_place if tile.c0 in ("float16", "bfloat16") else box_place("float32"))
    finish, last_step, store, own = finish_of(tile), last_step_of(tile), store_d(tile), slice_of(tile)
    factors_of = scales_at(tile)
    deep = _stretches if tile.promotes else _panels_of_integers if tile.panels else _one_product
    deep = _each_stage if tile.float8 else deep
    multiply, find = _three_products(tile) if tile.products == 3 else deep(tile), locate(tile)

    def consume(ring, grid, t, last, n, thread, warpgroup, d, scales, factors):
        stage = u32(0)
        acc = cuda.local.array(accumulators, number)
        totals = cuda.local.array(accumulators, number) if two_sets else acc
        parity = u32(0)
        half, warp, lane = warpgroup - u32(1), (thread >> u32(5)) & u32(3), thread & u32(31)
        warp_row = half * u32(64) + warp * u32(WARP_ROWS)
        buffers = ring.stages + staging + ((thread >> u32(5)) - u32(4)) * warp_bytes
        at, permuted = d_place(lane)
        c_at, c_permuted = c_place(lane)
        c_at += warp_row * u32(SPAN)
        c0_at, c0_permuted = c0_place(lane)
        c0_at += warp_row * u32(SPAN)
        first_box, image_at, image_permuted = image_place(warp, lane)
        image = warp, half, u32(first_box * warp_bytes + image_at), u32(image_permuted)
        mine, other = u32(1) + half, u32(2) - half  # numbers of turns; warpgroup 1 begins
        if turns and half == u32(1):
            instructions.give_turn(other)
        while t < grid.total:
            z, i, j = find(grid, t)
            row, column = u32(i * rows + warp_row), u32(j * columns)
            clear(totals)
            _, _, steps = own(z, last)
            factors_at = factors_of(scales, z, row, column, lane)
            of_lane = lane, c_at, c_permuted, factors_at
            stage, parity = multiply(acc, totals, ring, stage, parity, steps, half, of_lane, mine, other)
            stage, parity = finish(totals, ring, stage, parity, scales, z, factors_at, c_at, c_permuted, lane)
            stage, parity = last_step(totals, ring, stage, parity, c0_at, c0_permuted, lane, factors)
            left = i32(n) - i32(column)
            store(totals, buffers, at, permuted, lane, d, i32(column), i32(row), i32(z), left, image)
            t += u32(cuda.gridDim.x)
        instructions.wait_stores()

    return inlined(consume)


def _descriptors(tile: HopperTile) -> Callable[..., Any]:
    """Make ``(ring, stage, parity, half)``: wait until a stage is full; describe the warpgroup's rows of A, and B."""
    a_along_k, b_along_k = tile.a_major == "k", tile.b_major == "k"
    a_constant, b_constant = (u64(wgmma.descriptor(along, tile.depth)) for along in (a_along_k, b_along_k))
    a_half = u32(64 * SPAN if a_along_k else tile.depth * SPAN)  # from one warpgroup's rows of A to the other's
    b_offset, stage_bytes = u32(tile.parts * tile.a_bytes), u32(tile.stage_bytes)

    def describe(ring, stage, parity, half):
        instructions.wait(ring.full + stage * u32(8), parity)
        here = ring.stages + stage * stage_bytes
        a_tile = a_constant | u64(((here + half * a_half) & u32(0x3FFFF)) >> u32(4))
        b_tile = b_constant | u64(((here + b_offset) & u32(0x3FFFF)) >> u32(4))
        return a_tile, b_tile

    return inlined(describe)


def _one_product(tile: HopperTile) -> Callable[..., Any]:
    """Make ``(acc, totals, ring, stage, parity, k, half, of_lane, mine, other)``: add A B to ``acc``.

    ``of_lane`` is the lane, where it reads a box of C, and the address of its first factors (`scales_at`). ``mine``
    and ``other`` are the numbers of the warpgroups' turns, for tiles that take turns. Returns the next stage and its
    parity.

    The next stage's products are issued before those of this stage are complete, so a stage is freed one step late.
    """
    steps, depth, none = tile.depth // tile.instruction_depth, u32(tile.depth), u32(tile.stages)
    a_next, b_next = (wgmma.step(major == "k", tile.instruction_depth) for major in (tile.a_major, tile.b_major))
    describe, multiply, after = _descriptors(tile), wgmma.multiply(tile), following(tile)
    wait_all, wait_but_last = wgmma.wait_for(0), wgmma.wait_for(1)

    def accumulate(acc, totals, ring, stage, parity, last, half, of_lane, mine, other):
        lane = of_lane[0]
        before = none  # the stage whose products are still being added
        k = u32(0)
        while k < last:
            a_tile, b_tile = describe(ring, stage, parity, half)
            wgmma.fence()
            for s in range(steps):
                multiply(acc, a_tile + u64(s * a_next), b_tile + u64(s * b_next), 1)
            wgmma.commit()
            wait_but_last()
            if lane == u32(0) and before != none:
                instructions.arrive(ring.empty + before * u32(8))
            before = stage
            k += depth
            stage, parity = after(stage, parity)
        wait_all()
        if lane == u32(0):
            instructions.arrive(ring.empty + before * u32(8))
        return stage, parity

    return inlined(accumulate)


def _stretches(tile: HopperTile) -> Callable[..., Any]:
    """Make the same function as `_one_product`, for deep k: it adds the sum of each `STRETCH` steps to ``totals``.

    If the tile has panels, ``k`` is a triple: the k of each panel but the last, the number of panels, and the k of the
    last. Each panel is added as if it had a separate launch.

    If there is a C, it is read after the first `STRETCH` steps, and ``totals`` become its sum with C. The TMA loads C
    while the tensor cores multiply. If ``totals`` started from C, the tensor cores would wait for C in each tile.
    """
    multiply, clear, add = _one_product(tile), wgmma.clear(tile.columns // 2), wgmma.add(tile.columns // 2)
    stretch, adds, take_c, panelled = u32(tile.stretch), tile.adds, take_c_of(tile, added=False), tile.panels

    def accumulate(acc, totals, ring, stage, parity, last, half, of_lane, mine, other):
        lane, c_at, c_permuted, _ = of_lane
        k, panels, last_k = last if panelled else (last, u32(1), last)
        panel, left, first = u32(1), k, True
        while panel <= panels:
            clear(acc)
            steps = u32(min(stretch, left))
            stage, parity = multiply(acc, totals, ring, stage, parity, steps, half, of_lane, mine, other)
            if adds and first:
                stage, parity = take_c(totals, ring, stage, parity, c_at, c_permuted, lane, ())
            add(totals, acc)
            first = False
            left -= steps
            if left == u32(0):
                panel += u32(1)
                left = last_k if panel == panels else k
        return stage, parity

    return inlined(accumulate)


def _each_stage(tile: HopperTile) -> Callable[..., Any]:
    """Make the same function as `_one_product`, for 8-bit floats: it adds the sum of each stage to ``totals``.

    C is read after the first stage, as in `_stretches`. The warpgroups take turns, as in `_three_products`. A stage has
    a few hundred cycles, so a warpgroup waits for its next stage while the tensor cores multiply the last one.
    """
    steps, below = tile.depth // tile.instruction_depth, u32(tile.depth - 1)
    describe, multiply, after = _descriptors(tile), wgmma.multiply(tile), following(tile)
    step, wait_all, add = wgmma.step(True, tile.instruction_depth), wgmma.wait_for(0), wgmma.add(tile.columns // 2)
    adds, take_c, panelled = tile.adds_early, take_c_of(tile, added=False), tile.panels
    scaled, shift, count = tile.scaled_blocks, u32(tile.depth.bit_length() - 1), tile.columns // 4 + 2
    load, scale_and_add = load_factors(tile.columns), add_scaled(tile.columns)

    def accumulate(acc, totals, ring, stage, parity, last, half, of_lane, mine, other):
        lane, c_at, c_permuted, (rows, row_step, columns, column_step) = of_lane
        k, panels, last_k = last if panelled else (last, u32(1), last)
        left = u32((panels - u32(1)) * ((k + below) >> shift) + ((last_k + below) >> shift))  # stages
        here, first = stage, adds  # whether C comes next
        factors = cuda.local.array(count, f32)
        a_tile, b_tile = describe(ring, stage, parity, half)
        while left != u32(0):
            instructions.take_turn(mine)
            wgmma.fence()
            for s in range(steps):
                multiply(acc, a_tile + u64(s * step), b_tile + u64(s * step), s)
            wgmma.commit()
            instructions.give_turn(other)
            left -= u32(1)
            here = stage
            stage, parity = after(stage, parity)
            if left != u32(0) and not first:
                a_tile, b_tile = describe(ring, stage, parity, half)
            if scaled:  # read while the tensor cores multiply
                load(factors, rows, columns)
                rows, columns = rows + row_step, columns + column_step
            wait_all()
            if lane == u32(0):
                instructions.arrive(ring.empty + here * u32(8))
            if first:
                stage, parity = take_c(totals, ring, stage, parity, c_at, c_permuted, lane, ())
            if scaled:
                scale_and_add(totals, acc, factors)
            else:
                add(totals, acc)
            if first and left != u32(0):
                a_tile, b_tile = describe(ring, stage, parity, half)
            first = False
        return stage, parity

    return inlined(accumulate)


def _panels_of_integers(tile: HopperTile) -> Callable[..., Any]:
    """Make the same function as `_one_product`, for panels of integers; ``k`` is the triple of `_stretches`.

    Sums remain in the accumulators for all panels, so only the loads differ.
    """
    multiply, below = _one_product(tile), u32(tile.depth - 1)

    def accumulate(acc, totals, ring, stage, parity, last, half, of_lane, mine, other):
        k, panels, last_k = last
        whole = u32((k + below) & ~below)  # whole stages
        steps = u32((panels - u32(1)) * whole + last_k)
        return multiply(acc, totals, ring, stage, parity, steps, half, of_lane, mine, other)

    return inlined(accumulate)


def _three_products(tile: HopperTile) -> Callable[..., Any]:
    """Make the same function as `_one_product`, for operands in two parts: three products a stage, added to ``totals``.

    The tensor cores truncate their sum, so it is added to ``totals`` after each stage. The warpgroups take turns: one
    multiplies while the other adds. Without turns both sometimes add at the same time, and the tensor cores idle: 191
    TFLOP/s instead of 229 (fp16x3, n = 16384).
    """
    steps, depth = tile.depth // tile.instruction_depth, u32(tile.depth)
    a_low, b_low = u64(tile.a_bytes // 16), u64(tile.b_bytes // 16)
    a_next, b_next = (wgmma.step(major == "k", tile.instruction_depth) for major in (tile.a_major, tile.b_major))
    describe, multiply, after = _descriptors(tile), wgmma.multiply(tile), following(tile)
    add, wait_all = wgmma.add(tile.columns // 2), wgmma.wait_for(0)

    def accumulate(acc, totals, ring, stage, parity, last, half, of_lane, mine, other):
        lane, k = of_lane[0], u32(0)
        while k < last:
            a_tile, b_tile = describe(ring, stage, parity, half)
            instructions.take_turn(mine)
            wgmma.fence()
            for s in range(steps):
                multiply(acc, a_tile + a_low + u64(s * a_next), b_tile + u64(s * b_next), s)
            for s in range(steps):
                multiply(acc, a_tile + u64(s * a_next), b_tile + b_low + u64(s * b_next), 1)
            for s in range(steps):
                multiply(acc, a_tile + u64(s * a_next), b_tile + u64(s * b_next), 1)
            wgmma.commit()
            instructions.give_turn(other)
            wait_all()
            if lane == u32(0):
                instructions.arrive(ring.empty + stage * u32(8))
            add(totals, acc)
            k += depth
            stage, parity = after(stage, parity)
        return stage, parity

    return inlined(accumulate)

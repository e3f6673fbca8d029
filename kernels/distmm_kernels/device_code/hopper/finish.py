"""What follows the product of a tile: its factors, C, the conversion of sums, and the last step of a chain.

A tile of C has separate pipeline stages. wgmma reads A and B, but threads read C. The TMA may overwrite a stage before
a thread's reads are complete, unless the thread executes a fence, as `read_c` does. Without the fence, one element in
10,000 was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code.emit import inlined, u32, u64
from distmm_kernels.device_code.hopper import instructions
from distmm_kernels.device_code.hopper.epilogue import finish_d, not_zero, read_c, residue, scale
from distmm_kernels.device_code.hopper.ring import following
from distmm_kernels.tiles.hopper_tiles import MOST_C_STAGES, HopperTile, Output


def scales_at(tile: HopperTile) -> Callable[..., Any]:
    """Make ``(scales, z, row, column, lane)``: addresses of a thread's first factors of rows and columns, and steps.

    ``row`` and ``column`` are those of the warp's first element of matrix ``z``. The steps lead to the factors of the
    next stage, if stages have their own. Then a launch has one matrix.
    """
    scaled = tile.scaled or tile.scaled_blocks

    def at(scales, z, row, column, lane):
        rows, row_step, columns, column_step = scales
        if scaled:
            my_row, my_column = u32(row + lane // u32(4)), u32(column + lane % u32(4) * u32(2))
            rows += u64(z) * row_step + u64(my_row) * u64(4)
            columns += u64(z) * column_step + u64(my_column) * u64(4)
        return rows, row_step, columns, column_step

    return inlined(at)


def finish_of(tile: HopperTile) -> Callable[..., Any]:
    """Make ``(totals, ring, stage, parity, scales, z, at, c_at, c_permuted, lane)``: scale, add C, convert.

    ``at`` is what `scales_at` returns. C is read from the ring after A and B, so the function
    returns the next stage and parity.
    """
    scaled, add_c = tile.scaled, tile.adds and not tile.adds_early
    reduced, compared = tile.output == "int8", tile.output == "bool"
    rescale, reduce, compare = scale(tile.columns), residue(tile.columns), not_zero(tile.columns)
    take_c = take_c_of(tile, added=True)

    def finish(totals, ring, stage, parity, scales, z, at, c_at, c_permuted, lane):
        if scaled:
            rescale(totals, at[0], at[2])
        if add_c:
            stage, parity = take_c(totals, ring, stage, parity, c_at, c_permuted, lane, ())
        if reduced:
            reduce(totals, scales[0] + u64(z) * scales[1])
        if compared:
            compare(totals)
        return stage, parity

    return inlined(finish)


def last_step_of(tile: HopperTile) -> Callable[..., Any]:
    """Make ``(totals, ring, stage, parity, at, permuted, lane, factors)``: ``alpha * totals + beta * C0``.

    C0 is the last operand in the ring, so the function returns the next stage and parity.
    """
    if tile.c0 is not None:
        return _take(tile, tile.c0, lambda first, count: finish_d(first, count, tile.c0))
    multiplies, multiplied = tile.finishes, finish_d(0, tile.boxes("float32")[0], None)

    def finish(totals, ring, stage, parity, at, permuted, lane, factors):
        if multiplies:
            multiplied(totals, at, permuted, factors)
        return stage, parity

    return inlined(finish)


def take_c_of(tile: HopperTile, added: bool) -> Callable[..., Any]:
    """Make what `_take` makes, for C, without factors: read a tile of C to accumulators, or add it."""
    return _take(tile, tile.accumulator, lambda first, count: read_c(first, count, tile.accumulator, added))


def _take(tile: HopperTile, kind: Output, reader: Callable[[int, int], Any]) -> Callable[..., Any]:
    """Make ``(acc, ring, stage, parity, at, permuted, lane, factors)``: read a tile's boxes of elements of this type.

    ``at`` is the thread's address in a box, and ``permuted`` its position in that row. ``reader(first, count)`` makes
    the function that reads ``count`` boxes, from number ``first`` on. Returns the next stage and parity.
    """
    (boxes, together), stage_bytes, after = tile.boxes(kind), u32(tile.stage_bytes), following(tile)

    def taker(first):
        """Make the function that reads the stage with box ``first``. Without such a box, it does nothing."""
        count = max(0, min(together, boxes - first))
        read = reader(first, count)

        def take(acc, ring, stage, parity, at, permuted, lane, factors):
            if count == 0:
                return stage, parity
            instructions.wait(ring.full + stage * u32(8), parity)
            read(acc, ring.stages + stage * stage_bytes + at, permuted, factors)
            if lane == u32(0):
                instructions.arrive(ring.empty + stage * u32(8))
            return after(stage, parity)

        return inlined(take)

    # register numbers are constants, so each stage has a separate function
    take_0, take_1, take_2 = (taker(number * together) for number in range(MOST_C_STAGES))

    def take_all(acc, ring, stage, parity, at, permuted, lane, factors):
        stage, parity = take_0(acc, ring, stage, parity, at, permuted, lane, factors)
        stage, parity = take_1(acc, ring, stage, parity, at, permuted, lane, factors)
        return take_2(acc, ring, stage, parity, at, permuted, lane, factors)

    return inlined(take_all)

"""The ring of stages in shared memory, and how a tile of C comes through it: as A and B do, some boxes a stage.

C is read by threads, while A and B are read by wgmma, and the TMA may overwrite a stage before such reads are done,
unless each thread fences them, as `read_c` does: without, one element in 10,000 was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, int32, uint32

from distmm_kernels.device_code import barriers, tma
from distmm_kernels.device_code.epilogue import read_c
from distmm_kernels.hopper_tiles import C_BOX_BYTES, C_BOX_COLUMNS, MOST_C_STAGES, HopperTile

__all__ = ["following", "send_c", "take_c"]

# by Numba itself: a call would be compiled for the current device, and there may be none
_inlined = cuda.jit(device=True, inline="always")


def following(tile: HopperTile) -> Callable[..., Any]:
    """Make ``(stage, parity)``: the next stage, and the parity of its barriers."""
    ring = uint32(tile.stages)
    return _inlined(  # type: ignore[no-any-return]
        lambda stage, parity: (
            (uint32(0), parity ^ uint32(1)) if stage + uint32(1) == ring else (stage + uint32(1), parity)
        )
    )


def send_c(tile: HopperTile) -> Callable[..., Any]:
    """Make ``(shared, full, empty, stage, parity, c, x, y, z)``: load C; returns the next stage and parity."""
    boxes, together = uint32(tile.c_boxes), uint32(tile.c_stage_boxes)
    stage_bytes, after = uint32(tile.stage_bytes), following(tile)
    box_bytes, columns = uint32(C_BOX_BYTES), uint32(C_BOX_COLUMNS)

    def send(shared, full, empty, stage, parity, c, x, y, z):
        box = uint32(0)
        while box < boxes:
            barriers.wait(empty + stage * uint32(8), parity)
            here, barrier = shared + stage * stage_bytes, full + stage * uint32(8)
            count = uint32(min(together, boxes - box))
            barriers.expect_bytes(barrier, count * box_bytes)
            for _ in range(count):
                tma.load_box(here, c, barrier, x + int32(box * columns), y, z)
                here += box_bytes
                box += uint32(1)
            stage, parity = after(stage, parity)
        return stage, parity

    return _inlined(send)  # type: ignore[no-any-return]


def take_c(tile: HopperTile) -> Callable[..., Any]:
    """Make ``(acc, shared, full, empty, stage, parity, at, permuted, lane)``: read a tile of C into accumulators.

    ``at`` is where the thread reads in a box, ``permuted`` its place in that row. Returns the next stage and parity.
    """
    stage_bytes, after = uint32(tile.stage_bytes), following(tile)

    def taker(first):
        """Take the stage whose first box has this number: nothing, where the tile has no more boxes."""
        count = max(0, min(tile.c_stage_boxes, tile.c_boxes - first))
        read = read_c(first, count, tile.accumulator)

        def take(acc, shared, full, empty, stage, parity, at, permuted, lane):
            if count == 0:
                return stage, parity
            barriers.wait(full + stage * uint32(8), parity)
            read(acc, shared + stage * stage_bytes + at, permuted)
            if lane == uint32(0):
                barriers.arrive(empty + stage * uint32(8))
            return after(stage, parity)

        return _inlined(take)

    # registers have constant numbers, so each stage has a function of its own
    take_0, take_1, take_2 = (taker(number * tile.c_stage_boxes) for number in range(MOST_C_STAGES))

    def take_all(acc, shared, full, empty, stage, parity, at, permuted, lane):
        stage, parity = take_0(acc, shared, full, empty, stage, parity, at, permuted, lane)
        stage, parity = take_1(acc, shared, full, empty, stage, parity, at, permuted, lane)
        return take_2(acc, shared, full, empty, stage, parity, at, permuted, lane)

    return _inlined(take_all)  # type: ignore[no-any-return]

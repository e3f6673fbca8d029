"""The ring of pipeline stages in shared memory: one thread loads operands, and the consumer warps read them.

A stage holds one step of A and B. Its *full* mbarrier completes a phase when the loads have arrived. Its *empty*
mbarrier completes a phase when all consumer warps have read the stage. The parity of the phase changes with each pass
over the ring. So producer and consumers both keep the number of their stage and the parity that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from distmm_kernels.device_code.emit import cuda, inlined, u32
from distmm_kernels.device_code.hopper import instructions
from distmm_kernels.tiles import slices
from distmm_kernels.tiles.hopper_places import pairs_in_group, place, place_below
from distmm_kernels.tiles.hopper_tiles import CONSUMERS, GROUP, STRETCH, HopperTile


class Ring(NamedTuple):
    """Addresses in shared memory: the first stage, the first full barrier and the first empty barrier."""

    stages: Any
    full: Any
    empty: Any


class TileGrid(NamedTuple):
    """Tiles of the product: rows and columns of tiles in one C, number of tiles in one C, and in all C.

    Of a symmetric C: pairs of rows of tiles, tiles of a pair; and rows of tiles, and its place below the diagonal.
    """

    high: Any
    wide: Any
    each: Any
    total: Any
    rows: Any
    above: Any


def ring_of(tile: HopperTile) -> Callable[[Any, Any], Ring]:
    """Make ``(shared, thread)``: the ring. The first thread sets up the barriers, which follow the stages and D."""
    stages, offset = tile.stages, u32(tile.stages * tile.stage_bytes + tile.staging_bytes)

    def set_up(shared, thread):
        full = shared + offset
        empty = full + u32(8 * stages)
        if thread == u32(0):
            for i in range(stages):
                instructions.initialise(full + u32(8 * i), u32(1))
                instructions.initialise(empty + u32(8 * i), u32(CONSUMERS))
            instructions.fence_barrier_init()
        cuda.syncthreads()
        return Ring(shared, full, empty)

    return inlined(set_up)


def following(tile: HopperTile) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Make ``(stage, parity)``: the next stage, and the parity of its barriers."""
    stages = u32(tile.stages)
    return inlined(
        lambda stage, parity: (u32(0), parity ^ u32(1)) if stage + u32(1) == stages else (stage + u32(1), parity)
    )


def locate(tile: HopperTile) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
    """Make ``(grid, t)``: the matrix of tile ``t`` of all C, and its row and column, in tiles."""
    group, columns = u32(GROUP), u32(tile.columns // max(1, tile.symmetric))
    anywhere, below, together = inlined(place), inlined(place_below), inlined(pairs_in_group)

    def in_triangle(grid, t):
        z = u32(t // grid.each)
        pair, at = anywhere(u32(t - z * grid.each), grid.high, grid.wide, together(grid.high))
        i, j = below(pair, at, grid.rows, columns, grid.above)
        return z, i, j

    def in_all(grid, t):
        z = u32(t // grid.each)
        i, j = anywhere(u32(t - z * grid.each), grid.high, grid.wide, group)
        return z, i, j

    return inlined(in_triangle if tile.symmetric else in_all)


def slice_of(tile: HopperTile) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
    """Make ``(z, k)``: for matrix ``z`` of D, the matrix of A and B, the first step of k, and the number of steps.

    The last slice has as many steps as the others: beyond k, operands are zero. If the number of steps were not known
    to be the same in all threads, the TMA's loop could not use the uniform datapath.
    """
    if not tile.sliced:
        return inlined(lambda z, k: (z, u32(0), k))
    find, stretch = inlined(slices.place), u32(STRETCH)

    def sliced(z, k):
        matrix, first = find(z, k)
        return matrix, first, stretch

    return inlined(sliced)

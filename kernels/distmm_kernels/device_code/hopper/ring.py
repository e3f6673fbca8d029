"""The ring of pipeline stages in shared memory: one thread loads operands, and the consumer warps read them.

A stage holds one step of A and B. Its *full* mbarrier completes a phase when the loads have arrived. Its *empty*
mbarrier completes a phase when all consumer warps have read the stage. The parity of the phase changes with each pass
over the ring. So producer and consumers both keep the number of their stage and the parity that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from distmm_kernels.device_code.emit import cuda, inlined, types
from distmm_kernels.device_code.hopper import instructions
from distmm_kernels.tiles import slices
from distmm_kernels.tiles.hopper_places import pairs_in_group, place, place_below
from distmm_kernels.tiles.hopper_tiles import CONSUMERS, GROUP, STRETCH, HopperTile

uint32 = types.uint32


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


def barriers_of(tile: HopperTile) -> Callable[[Any], tuple[Any, Any]]:
    """Make ``(shared)``: the addresses of the first full and the first empty barrier, after the stages and D."""
    offset, full_bytes = uint32(tile.stages * tile.stage_bytes + tile.staging_bytes), uint32(8 * tile.stages)

    def addresses(shared):
        full = shared + offset
        return full, full + full_bytes

    return inlined(addresses)


def initialise(tile: HopperTile) -> Callable[[Any, Any, Any], None]:
    """Make ``(thread, full, empty)``: the first thread sets up all barriers, then the block may use them."""
    stages = tile.stages

    def set_up(thread, full, empty):
        if thread == uint32(0):
            for i in range(stages):
                instructions.initialise(full + uint32(8 * i), uint32(1))
                instructions.initialise(empty + uint32(8 * i), uint32(CONSUMERS))
            instructions.fence_barrier_init()
        cuda.syncthreads()

    return inlined(set_up)


def following(tile: HopperTile) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Make ``(stage, parity)``: the next stage, and the parity of its barriers."""
    stages = uint32(tile.stages)
    return inlined(
        lambda stage, parity: (
            (uint32(0), parity ^ uint32(1)) if stage + uint32(1) == stages else (stage + uint32(1), parity)
        )
    )


def locate(tile: HopperTile) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
    """Make ``(grid, t)``: the matrix of tile ``t`` of all C, and its row and column, in tiles."""
    group, columns = uint32(GROUP), uint32(tile.columns // max(1, tile.symmetric))
    anywhere, below, together = inlined(place), inlined(place_below), inlined(pairs_in_group)

    def in_triangle(grid, t):
        z = uint32(t // grid.each)
        pair, at = anywhere(uint32(t - z * grid.each), grid.high, grid.wide, together(grid.high))
        i, j = below(pair, at, grid.rows, columns, grid.above)
        return z, i, j

    def in_all(grid, t):
        z = uint32(t // grid.each)
        i, j = anywhere(uint32(t - z * grid.each), grid.high, grid.wide, group)
        return z, i, j

    return inlined(in_triangle if tile.symmetric else in_all)


def slice_of(tile: HopperTile) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
    """Make ``(z, k)``: for matrix ``z`` of D, the matrix of A and B, the first step of k, and the number of steps.

    The last slice has as many steps as the others: beyond k, operands are zero. If the number of steps were not known
    to be the same in all threads, the TMA's loop could not use the uniform datapath.
    """
    if not tile.sliced:
        return inlined(lambda z, k: (z, uint32(0), k))
    find, stretch = inlined(slices.place), uint32(STRETCH)

    def sliced(z, k):
        matrix, first = find(z, k)
        return matrix, first, stretch

    return inlined(sliced)

"""Where tiles of the Hopper kernel are in C, and where the lanes of a warp write boxes of D in shared memory. Pure.

All integers are uint32: the kernel calls these functions too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import uint32

from distmm_kernels.tiles.hopper_tiles import BITS, ROWS, SPAN, Output


def place(tile: Any, high: Any, wide: Any, group: Any) -> tuple[Any, Any]:
    """Return the row and the column of a tile from its number, in tiles, in a C of ``high`` by ``wide`` tiles.

    Tiles are numbered in groups of ``group`` rows, and in a group column by column. The last group may have fewer rows.
    """
    above = uint32(tile // uint32(group * wide) * group)
    height = uint32(min(group, high - above))
    inside = uint32(tile - above * wide)
    column = uint32(inside // height)
    return uint32(above + inside - column * height), column


def rows_in_pairs(high: int, columns: int, above: int = 0) -> tuple[int, int]:
    """Return the grid of tiles of a symmetric C with ``high`` rows of tiles, for `place_below`: pairs, and tiles each.

    The first and the last row are a pair, then the second and the last but one, and so on. Together they have about as
    many tiles as any other pair: this returns the most. What a pair, or a row without another one, has fewer is filled
    by tiles above the diagonal, which are not stored. No tile that is stored has two places: both would add to C.

    If C is a part of the product, its rows begin ``above`` rows below the diagonal of its first column.
    """
    pairs = (high + 1) // 2
    rows = np.arange(high)
    tiles = (rows * ROWS + (ROWS - 1) + above) // columns + 1  # that touch the diagonal or lie below it
    both = tiles[::-1][:pairs] + np.where(2 * rows[:pairs] + 1 == high, 0, tiles[:pairs])
    return pairs, int(both.max())


def pairs_in_group(high: Any) -> Any:
    """Return the pairs of rows of tiles in a group (`place`) of a symmetric C of ``high`` pairs.

    `gram` of bfloat16, microseconds for groups of 2, 4, 8 and 16 (H200, 2026-11-29): n = 4096, 16 pairs, 102, 99, 105
    and 110; 12288, 48 pairs, 1699, 1699, 1653 and 1652.
    """
    return uint32(4) if high <= uint32(32) else uint32(8)


def place_below(pair: Any, place: Any, high: Any, columns: Any, above: Any) -> tuple[Any, Any]:
    """Return the row and the column of a tile of a symmetric C, in tiles, from its place in a pair of rows of tiles.

    The other arguments are those of `rows_in_pairs`.
    """
    row = uint32(high - uint32(1) - pair)
    tiles = uint32(uint32(row * uint32(ROWS) + uint32(ROWS - 1) + above) // columns + uint32(1))
    if place < tiles:
        return row, place
    if row == pair:  # the last tile of the first row
        return uint32(0), uint32(uint32(high * uint32(ROWS) - uint32(1) + above) // columns)
    return pair, uint32(place - tiles)


def box_place(output: Output) -> Callable[[Any], tuple[Any, Any]]:
    """Return the function that tells where a lane writes the first 8 or 16 columns of a box of D.

    It takes a lane (uint32) and returns two offsets in bytes: one from the box's start, and a swizzled one within the
    row of 128 bytes. The kernel combines the second one with the offset of the columns by exclusive or, and adds it to
    the first one. The 16-byte unit ``u`` of row ``r`` is stored as unit ``u ^ (r % 8)``.
    """
    return {32: _words_place, 16: _halves_place, 8: _bytes_place}[BITS[output]]


def _words_place(lane):  # type: ignore[no-untyped-def]
    """8 rows of 8 words. Each lane writes two words of one row, which are half a unit."""
    row, pair = uint32(lane // uint32(4)), uint32(lane % uint32(4))
    return row * uint32(SPAN) + pair % uint32(2) * uint32(8), (pair // uint32(2) ^ row) * uint32(16)


def _halves_place(lane):  # type: ignore[no-untyped-def]
    """Four matrices of 8 rows of one unit: upper and lower rows of 8 columns, then of the next 8. A row for a lane."""
    matrix, row = uint32(lane // uint32(8)), uint32(lane % uint32(8))
    return (matrix % uint32(2) * uint32(8) + row) * uint32(SPAN), (matrix // uint32(2) ^ row) * uint32(16)


def pairs_place(lane):  # type: ignore[no-untyped-def]
    """Like `box_place`, for a lane that reads two adjacent 16-bit elements: 8 rows of 8 columns, one unit each."""
    row, pair = uint32(lane // uint32(4)), uint32(lane % uint32(4))
    return row * uint32(SPAN) + pair * uint32(4), row * uint32(16)


def mirrored_place(output: Output) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
    """Return the function that tells where a lane writes the mirror image of the first 8 or 16 columns of a box of D.

    A warpgroup's 64 rows of a box become four boxes of the same shape, which the four warps store. Of 16-bit elements,
    warp w stores rows ``16 w`` to ``16 w + 15`` of the mirror image. Of 32-bit elements it stores these rows of ``w //
    2``, and of these the columns of ``w % 2``.

    The function takes a warp and a lane (uint32). It returns the first warp whose box the lane writes, and two offsets
    as in `box_place`.
    """
    return _mirrored_words if BITS[output] == 32 else _mirrored_halves


def _mirrored_words(warp, lane):  # type: ignore[no-untyped-def]
    """8 columns of 16 rows become 8 rows; each lane writes a word of two rows, and two units further on."""
    row, pair = uint32(lane // uint32(4)), uint32(uint32(2) * (lane % uint32(4)))
    unit = uint32(warp % uint32(2) * uint32(4) + row // uint32(4))
    return warp // uint32(2), pair * uint32(SPAN) + row % uint32(4) * uint32(4), (unit ^ pair) * uint32(16)


def _mirrored_halves(warp, lane):  # type: ignore[no-untyped-def]
    """Transposed matrices of `_halves_place`."""
    matrix, row = uint32(lane // uint32(8)), uint32(lane % uint32(8))
    unit = uint32(warp * uint32(2) + matrix % uint32(2))
    return warp * uint32(0), (matrix // uint32(2) * uint32(8) + row) * uint32(SPAN), (unit ^ row) * uint32(16)


def _bytes_place(lane):  # type: ignore[no-untyped-def]
    """8 rows of 8 bytes, which are half a unit. Each lane writes two bytes of one row."""
    row, pair = uint32(lane // uint32(4)), uint32(lane % uint32(4))
    return row * uint32(SPAN) + pair * uint32(2), row * uint32(16)

"""Writing units of arrays: the chunks of files, or their shards. A write to a part of a unit writes all of it.

Two tasks that write parts of one unit at the same time lose blocks: each reads the unit, changes its part, and writes
the whole. Pure.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np

Unit = tuple[int, ...]


def unit_of(array: Any) -> Unit | None:
    """Return the shape of what is written in one go: an array's ``shards``, or else its ``chunks``; None without."""
    for name in ("shards", "chunks"):
        unit = getattr(array, name, None)
        if (
            isinstance(unit, tuple)
            and len(unit) == len(array.shape)
            and all(isinstance(n, (int, np.integer)) and n > 0 for n in unit)
        ):
            return tuple(map(int, unit))
    return None


def whole_units(edges: tuple[int, ...], start: int, unit: int) -> tuple[int, ...]:
    """Move the borders between consecutive blocks to multiples of `unit`, each to the nearest.

    Parameters
    ----------
    edges : tuple of int
        Of the blocks.
    start : int
        Where the first one begins. This border and the last one do not move.
    unit : int

    Returns
    -------
    tuple of int
        Edges with the same sum. No two of these blocks have a part of the same unit.
    """
    stop = start + sum(edges)
    rounded = ((start + end + unit // 2) // unit * unit for end in accumulate(edges[:-1]))
    borders = sorted({border for border in rounded if start < border < stop} | {start, stop})
    return tuple(after - before for before, after in pairwise(borders)) or edges[:1]


def are_shared(region: tuple[slice, ...], shape: tuple[int, ...], unit: Unit) -> bool:
    """Whether a region of an array begins or ends inside a unit whose other part belongs to another region."""
    return any(
        at.start % n or (at.stop % n and at.stop != size) for at, size, n in zip(region, shape, unit, strict=True)
    )

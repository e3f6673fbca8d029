"""Slices of k: a product of few tiles and deep k has each stretch of k multiplied at the same time. Pure.

A multiprocessor needs a tile. Where C has few tiles, the stretches of k, whose sums are added to C one after the other,
are products of their own, and one more kernel adds their results, in the same order. So the bits are the same, and
slicing may depend on shape and GPU. Where slices begin depends on k alone: at multiples of the stretch.

The sign of a zero may differ in a product without C. Where one multiprocessor adds slices, its total begins at +0.
Where they are added later, the total begins at the first sum: it is -0 if all sums are. Tensor cores return -0 for a
negative sum that float32 cannot hold, such as -1e-60, by the model in `distmm_kernels.reference.twins`; this was not
tried on a GPU. Three products do the same in both ways: each granule is stored before the next one is added to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numpy import uint32

from distmm_kernels.tiles.hopper_tiles import RATES, STRETCH, best_columns, cost

__all__ = ["COLUMNS", "THREADS", "WORKSPACE", "at_once", "count", "place", "runs"]

THREADS = 256  # of a block of the kernel that adds sums
COLUMNS = 4  # of a thread: 16 bytes of each sum

# Bytes of the sums of slices that are multiplied at once. They come back from the second-level cache, of 60 MB, mostly.
WORKSPACE = 1 << 26

# Slicing must save a quarter. To write and read sums takes 8 bytes for 2 * STRETCH operations: at 4.2 TB/s 8 % of the
# time of a bfloat16 product, and 16 % of that of int8.
WORTH = 1.25


def count(k: int) -> int:
    """Return how many slices k has."""
    return -(-k // STRETCH)


def place(z: Any, k: Any) -> tuple[Any, Any]:
    """Return the matrix of A and B, and the first step of k, of which matrix ``z`` of D is the product.

    A matrix of A and B makes one matrix of D after the other. All integers are unsigned, of 32 bits: the kernel calls
    this function too.
    """
    slices = uint32((k + uint32(STRETCH - 1)) // uint32(STRETCH))
    matrix = uint32(z // slices)
    return matrix, uint32((z - matrix * slices) * uint32(STRETCH))


def runs(slices: int, together: int) -> Iterator[tuple[int, int]]:
    """Cut slices into runs of ``together``, the last one shorter: the first of each, and that of the next."""
    for first in range(0, slices, together):
        yield first, min(first + together, slices)


@functools.lru_cache(maxsize=1024)
def at_once(m: int, n: int, slices: int, batch: int, products: int, multiprocessors: int, widest: int) -> int:
    """Return how many slices of products ``(batch, m, n)`` to multiply at the same time; 1: one after the other.

    Parameters
    ----------
    products
        Of the tile, 1 or 3.
    widest
        Columns of the widest tile where slices are not multiplied at the same time.
    """
    # one more C holds the sum of the runs before
    most = min(slices, WORKSPACE // (4 * batch * m * (n + -n % COLUMNS)) - 1)
    if most < 2:
        return 1

    def time(together: int, widest: int) -> float:
        columns = best_columns(m, n, batch * together, products, multiprocessors, widest)
        return -(-slices // together) * cost(m, n, batch * together, products, multiprocessors, columns)

    fewest = -(-slices // most)  # runs; a few more may fill the last round of tiles better
    sizes = (max(2, -(-slices // number)) for number in range(fewest, fewest + 4))
    together = min(sizes, key=lambda size: time(size, max(RATES[products])))  # the largest of equally fast ones
    return together if WORTH * time(together, max(RATES[products])) <= time(1, widest) else 1

"""Split-K: if C has few tiles and k is large, several slices of k are multiplied at the same time. Pure.

A slice is `STRETCH` steps of k. Without split-K, one thread block computes a tile of C. It adds the sums of the slices
to the tile in ascending k. If C has fewer tiles than the GPU has multiprocessors, some of these are idle. With split-K,
each slice is a separate product, and another kernel adds the results in the same order. So both ways give the same
bits, and the choice may depend on the shape and the GPU. Slices begin at multiples of `STRETCH` in both ways.

Only the sign of a zero may differ, in a product without C. Without split-K, the total starts from +0. With split-K, it
starts from the first sum, so it is -0 if all sums are -0. Tensor cores return -0 for a negative sum that is too small
for float32, such as -1e-60, by the model in `twins.py` of the tests; this was not tried on a GPU. Kernels with
three products return the same zero in both ways: they store each granule before they add the next one to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numpy import uint32

from distmm_kernels.tiles.hopper_tiles import STRETCH
from distmm_kernels.tiles.hopper_widths import RATES, best_columns, cost

THREADS = 256  # of a block of the kernel that adds the sums of slices
COLUMNS = 4  # that a thread adds: 16 bytes of each sum

# Bytes of the sums of slices that are multiplied at the same time. The kernel that adds them reads them mostly from the
# L2 cache, of 50 MB.
WORKSPACE = 1 << 26

# Split-K is used if the estimated time without it is at least 1.25 times as long. Split-K writes and reads 8 bytes for
# each 2 * STRETCH operations: at 4.2 TB/s this takes 8 % of the time of a bfloat16 product, and 16 % of that of int8.
WORTH = 1.25


def count(k: int) -> int:
    """Return the number of slices of k."""
    return -(-k // STRETCH)


def place(z: Any, k: Any) -> tuple[Any, Any]:
    """Return the matrix of A and B, and the first step of k, whose product is matrix ``z`` of D.

    D has all slices of the first matrix of A and B, then those of the second, and so on. All integers are uint32: the
    kernel calls this function too.
    """
    slices = uint32((k + uint32(STRETCH - 1)) // uint32(STRETCH))
    matrix = uint32(z // slices)
    return matrix, uint32((z - matrix * slices) * uint32(STRETCH))


def runs(slices: int, together: int) -> Iterator[tuple[int, int]]:
    """Yield ``(first, end)`` of each run of ``together`` slices. The last run may be shorter."""
    for first in range(0, slices, together):
        yield first, min(first + together, slices)


@functools.lru_cache(maxsize=1024)
def at_once(
    m: int, n: int, slices: int, batch: int, products: int, multiprocessors: int, widest: int, symmetric: int = 0
) -> int:
    """Return how many slices of products ``(batch, m, n)`` to multiply at the same time; 1: no split-K.

    Parameters
    ----------
    products
        `HopperTile.products`: 1 or 3.
    widest
        Columns of the widest tile without split-K.
    symmetric
        `HopperTile.symmetric`.
    """
    # the workspace also has one C with the sum of the previous runs
    most = min(slices, WORKSPACE // (4 * batch * m * (n + -n % COLUMNS)) - 1)
    if most < 2:
        return 1

    def time(together: int, widest: int) -> float:
        shape = m, n, batch * together, products, multiprocessors
        columns = best_columns(*shape, widest, symmetric)
        return -(-slices // together) * cost(*shape, columns, symmetric)

    fewest = -(-slices // most)  # the smallest number of runs; with a few more, the last wave of tiles may be fuller
    sizes = (max(2, -(-slices // number)) for number in range(fewest, fewest + 4))
    together = min(sizes, key=lambda size: time(size, max(RATES[products])))  # of equally fast sizes, the largest
    return together if WORTH * time(together, max(RATES[products])) <= time(1, widest) else 1

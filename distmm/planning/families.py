"""The tables of owners that are worth comparing: by what stays where it is, and by grid.

Homes may leave some ranks with more work than others. In a *balanced* table, ranks that have more than `BALANCE` times
their share of the operations pass on what they hold the least of. The search compares both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from distmm.planning.blocks import Blocking
from distmm.planning.owners import FAMILIES, Chunks, Family, Grid, Homes, Owners, Places, homes_array

# Most operations of a rank, as a multiple of its even share, if blocks can be passed on.
BALANCE = 1.2

# Block products of a product that gets tables. More take the planner too long.
MOST_PRODUCTS = 1 << 15


def candidates(
    blocking: Blocking,
    homes: Places,
    workers: int,
    one_chain: bool,
    chunks: tuple[Chunks, ...] | None = None,
) -> Iterator[Owners]:
    """Yield the owners that are worth comparing; with `one_chain` only those that never split k.

    None if the blocks are too many, or batched.
    """
    products = len(blocking.m) * len(blocking.k) * len(blocking.n)
    if blocking.batch or products * workers > MOST_PRODUCTS * 8 or products > MOST_PRODUCTS:
        return
    for grid in Grid.all_of(workers):
        yield of_grid(grid, blocking, homes, chunks)
    if workers == 1:
        return
    seen = set()
    for family in FAMILIES:
        # A symmetric product reads each block of A in two places: as A, and as the transpose of a block of B.
        if (one_chain and family in "abkABK") or (blocking.triangle and family in "abcABC"):
            continue
        owners = of_family(family, blocking, homes, workers, chunks)
        if (family.lower(), owners.table) not in seen:
            seen.add((family.lower(), owners.table))
            yield owners


def of_grid(
    grid: Grid,
    blocking: Blocking,
    homes: Places,
    chunks: tuple[Chunks, ...] | None = None,
) -> Owners:
    """Return the owners of C by a grid of one layer, block-cyclic."""
    table = tuple((tuple(grid.owner(i, j) for j in range(len(blocking.n))),) for i in range(len(blocking.m)))
    return Owners(grid.size, grid.text, table, homes, chunks=chunks)


def of_family(
    family: Family,
    blocking: Blocking,
    homes: Places,
    workers: int,
    chunks: tuple[Chunks, ...] | None = None,
) -> Owners:
    """Return the owners if A, B, C by rows or by columns, or panels stay.

    Parameters
    ----------
    family : {"r", "c", "a", "b", "k", "R", "C", "A", "B", "K"}
    blocking : Blocking
    homes : Places
    workers : int
    chunks : tuple of Chunks, optional
    """
    m, k, n = (np.array(edges, np.int64) for edges in (blocking.m, blocking.k, blocking.n))
    of_m, of_k, of_n = chunks or tuple(tuple((edge,) for edge in edges.tolist()) for edges in (m, k, n))
    a, b = _held(homes.a, of_m, of_k, workers), _held(homes.b, of_k, of_n, workers)
    held, work, shape = {
        "k": (a.sum(axis=1) + (0 if blocking.triangle else b.sum(axis=2)), k, (1, -1, 1)),
        "r": (a.sum(axis=2), np.cumsum(m) if blocking.triangle else m, (-1, 1, 1)),
        "c": (b.sum(axis=1), n, (1, 1, -1)),
        "a": (a.reshape(workers, -1), np.outer(m, k).ravel(), (len(m), len(k), 1)),
        "b": (b.reshape(workers, -1), np.outer(k, n).ravel(), (1, len(k), len(n))),
    }[family.lower()]
    ranks = _shared_out(held, work, BALANCE if family.isupper() else math.inf)
    table = tuple(tuple(map(tuple, plane)) for plane in ranks.reshape(shape).tolist())
    return Owners(workers, family, table, homes, chunks=chunks)


@lru_cache(maxsize=8)  # all families of some blocks ask for the same
def _held(homes: Homes | None, down: Chunks, across: Chunks, workers: int) -> np.ndarray[tuple[int, ...], Any]:
    """Elements of an operand's blocks at each rank ``(workers, rows, columns)``."""
    if homes is None:
        return np.zeros((workers, len(down), len(across)), np.int64)
    at = homes_array(homes) == np.arange(workers)[:, None, None]
    elements: np.ndarray[tuple[int, ...], Any] = at * np.outer(
        [edge for block in down for edge in block], [edge for block in across for edge in block]
    )
    for axis, blocks in ((1, down), (2, across)):
        elements = np.add.reduceat(elements, np.cumsum([0, *map(len, blocks[:-1])]), axis=axis)
    return elements


def _shared_out(held: np.ndarray, work: np.ndarray, balance: float) -> np.ndarray:
    """Give each item to the rank that holds most of it, and then pass items on until no rank has too much work.

    Parameters
    ----------
    held : array of int ``(ranks, items)``
        Elements of each item that a rank holds.
    work : array of int ``(items,)``
        Operations of each item.
    balance : float
        Most work of a rank, as a multiple of its even share.
    """
    workers, items = held.shape
    loads = np.zeros(workers, np.int64)
    ranks = np.zeros(items, np.int64)
    for item in np.argsort(-held.max(axis=0), kind="stable"):  # items that are nowhere fill up the rest
        best = np.flatnonzero(held[:, item] == held[:, item].max())
        ranks[item] = best[np.argmin(loads[best])]
        loads[ranks[item]] += work[item]
    most = max(1, work.sum()) / workers * balance  # all work is 0 in products of empty matrices
    while loads.max() > most:
        busiest, least = int(loads.argmax()), int(loads.argmin())
        mine = np.flatnonzero(ranks == busiest)
        fitting = mine[loads[least] + work[mine] < loads[busiest]]
        if not len(fitting):
            break
        item = fitting[np.argmin(held[busiest, fitting] - held[least, fitting])]
        ranks[item] = least
        loads[busiest] -= work[item]
        loads[least] += work[item]
    return ranks

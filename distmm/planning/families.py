"""The tables of owners that are worth comparing: by what stays where it is, by grid, and for unions of chunks.

Homes may leave some ranks with more work than others. In a *balanced* table, ranks that have more than `BALANCE` times
their share of the operations pass on what they hold the least of. The search compares both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from distmm.planning.blocks import Blocking, united
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.owners import FAMILIES, Chunks, Family, Grid, Homes, Owners, Places, homes_array

# Most operations of a rank, as a multiple of its even share, if blocks can be passed on.
BALANCE = 1.2

# Block products of a product that gets tables. More take the planner too long.
MOST_PRODUCTS = 1 << 15

# Products of chunks for each worker from which on blocks may be unions of the chunks. 4 x 4 x 4 chunks, n = 4096 and
# 16384, sums of C on one H200 (2026-11-30): 0.031 and 0.071 s by unions, 0.101 and 0.133 by chunks. If C has one row or
# column of chunks, as X @ v, joining the chunks of X takes as long as the product: then from MANY_PRODUCTS on.
SOME_PRODUCTS, MANY_PRODUCTS = 4, 64

# Length along k to which CPUs unite shorter panels. n = 4096 in persisted chunks of 256, on a worker with two threads
# (2026-11-30, commits 619ac0aa and d7ff737c): 1.3 times NumPy's seconds, and 1.6 to 1.7 in panels of 256.
DEEP_PANEL = 1024


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


def unions_of(blocking: Blocking, cluster: ClusterSpec) -> Iterator[tuple[Blocking, tuple[Chunks, ...]]]:
    """Blocks that are unions of chunks: so few blocks of C that each worker has one, four or 16 of them.

    Only if there are several chunk products for each worker, and chunks to unite along the batch, m or n. Chunks along
    the batch are united only if they are more than these blocks of C. On GPUs, panels of k stay apart: a task takes
    several of them, and sums are rounded where they are without unions. Neighbouring panels are united only if the
    product would have more than `MOST_PRODUCTS` block products. CPUs, whose BLAS reads and writes C for each panel and
    promises no bits, unite panels that are shorter than `DEEP_PANEL`.
    """
    *stacks, m, k, n = map(len, blocking.cuts)
    few = MANY_PRODUCTS if min(m, n) == 1 and not stacks else SOME_PRODUCTS
    if math.prod((*stacks, m, k, n)) <= few * cluster.workers:
        return
    seen = {(*stacks, m, n)}
    for each in (1, 2, 4):
        counts, left = [], (each * (math.isqrt(cluster.workers - 1) + 1)) ** 2  # blocks of C that are wanted
        for count in stacks:
            counts.append(min(count, left))
            left = -(-left // counts[-1])
        counts += [min(count, math.isqrt(left - 1) + 1) for count in (m, n)]
        if tuple(counts) not in seen:
            seen.add(tuple(counts))
            deep = min(k, max(1, MOST_PRODUCTS // math.prod(counts)))
            if cluster.device == "cpu":
                deep = min(deep, max(1, sum(blocking.k) // DEEP_PANEL))
            counts.insert(-1, deep)
            cuts = tuple(united(edges, count) for edges, count in zip(blocking.cuts, counts, strict=True))
            *batch, down, along, across = (tuple(map(sum, blocks)) for blocks in cuts)
            yield replace(blocking, m=down, k=along, n=across, batch=tuple(batch)), cuts


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

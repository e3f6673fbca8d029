"""Owners as tables: which rank multiplies which blocks, for operands that are in the workers' memory already.

One block product is ``A[i, p] @ B[p, j]``. `Owners.rank` says which rank computes it. An operand *stays* if its blocks
are multiplied where they are:

==========  ==============================================  ============================================
stays       the table has                                   what moves
==========  ==============================================  ============================================
C by grid   the rank of ``C[i, j]``: block-cyclic           A and B
C by rows   the rank that has most of block row i of A      B, and blocks of A that are elsewhere
C by cols   the rank that has most of block column j of B   A, and blocks of B that are elsewhere
A           the rank of ``A[i, p]``                         B, and partial sums of C
B           the rank of ``B[p, j]``                         A, and partial sums of C
panels      the rank that has most of panel p of A and B    partial sums of C, and the rest of the panels
==========  ==============================================  ============================================

Homes may leave some ranks with more work than others. In a *balanced* table, ranks that have more than `BALANCE` times
their share of the operations pass on what they hold the least of. The search compares both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from distmm.planning.blocks import Blocking
from distmm.planning.grid import Grid

__all__ = [
    "FAMILIES",
    "MOST_PRODUCTS",
    "NOWHERE",
    "Family",
    "Homes",
    "Owners",
    "Places",
    "candidates",
    "homes_array",
    "of_family",
    "of_grid",
]

# Rank that holds each block of an operand, as rows of block columns; -1 for a block that is in no worker's memory.
Homes = tuple[tuple[int, ...], ...]


class Places(NamedTuple):
    """Homes of A and of B; None if no block of the operand is in memory.

    `same` says that B is A itself, as in ``A @ A``, and all of it in memory: blocks of the same indices are one block.
    """

    a: Homes | None = None
    b: Homes | None = None
    same: bool = False

    @property
    def known(self) -> bool:
        """Whether blocks of A or of B are in memory."""
        return self.a is not None or self.b is not None


NOWHERE = Places()


# Edges of the chunks that each block along a dimension is made of.
Chunks = tuple[tuple[int, ...], ...]

# What stays, as a plan's text names it: C by block rows or by block columns, A, B, or panels of k. Capitals: balanced.
Family = Literal["r", "c", "a", "b", "k", "R", "C", "A", "B", "K"]
FAMILIES: tuple[Family, ...] = ("k", "r", "c", "a", "b", "K", "R", "C", "A", "B")

# Most operations of a rank, as a multiple of its even share, if blocks can be passed on.
BALANCE = 1.2

# Block products of a product that gets tables. More take the planner too long.
MOST_PRODUCTS = 1 << 15


@dataclass(frozen=True)
class Owners:
    """The rank of every block product, and the ranks that hold the operands' blocks when the product begins.

    Attributes
    ----------
    size : int
        Number of workers.
    stays : str
        One of `FAMILIES`, or the text of a grid, ``"2x2x1"``.
    table : tuple of tuple of int
        Rank by (i, j) if C stays, by (i, p) for A, by (p, j) for B, and by (0, p) for panels.
    homes : Places
    fewest : int, optional
        The fewest bytes that any family moves from these homes, whatever its balance. None if this was not computed, or
        if no block is in memory: then one worker that loads all of them moves nothing.
    chunks : tuple of Chunks, optional
        If blocks are unions of the user's chunks: the edges of the chunks of each block, along m, k and n. `homes` are
        then those of the chunks.
    triangle : bool
        Whether only the blocks of C with ``i >= j`` are multiplied.
    """

    size: int
    stays: str
    table: tuple[tuple[int, ...], ...]
    homes: Places
    fewest: int | None = None
    chunks: tuple[Chunks, Chunks, Chunks] | None = None
    triangle: bool = False

    # A schedule reads these of a `Grid`, too. C is one wave, so waves are cut at no multiple.
    rows = columns = 1

    @property
    def layers(self) -> int:
        """Most chains that a block of C may have."""
        return 1 if self.c_stays else self.size

    @property
    def c_stays(self) -> bool:
        """Whether each block of C is made by one chain."""
        return self.stays not in tuple("abkABK")

    def rank(self, i: int, p: int, j: int) -> int:
        """Rank that multiplies ``A[i, p]`` by ``B[p, j]``."""
        if self.c_stays:
            return self.table[i][j]
        if self.stays in "kK":
            return self.table[0][p]
        return self.table[i][p] if self.stays in "aA" else self.table[p][j]

    def ranks(self, m: int, k: int, n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """All ranks ``(m, k, n)``, for numbers of blocks along m, k and n."""
        table = np.array(self.table, np.int64)
        shaped = table[:, None, :] if self.c_stays else table[:, :, None] if self.stays in "akAK" else table[None]
        return np.broadcast_to(shaped, (m, k, n))

    def chains(self, i: int, j: int, panels: int) -> list[tuple[int, list[int]]]:
        """Return the ranks that multiply for ``C[i, j]``, each with its panels in ascending k.

        The first of them makes C. It is another one for the next block of C, so that sums are shared out.
        """
        found: dict[int, list[int]] = {}
        for p in range(panels):
            found.setdefault(self.rank(i, p, j), []).append(p)
        ordered = sorted(found.items())
        turn = (i + j) % len(ordered)
        return ordered[turn:] + ordered[:turn]

    def homes_of_chunks(self, m: int, k: int, n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Ranks of the chunks of A and of B, for m x k x n blocks; a chunk in no memory goes to a rank that reads it.

        Chunks of other numbers have other readers, so that loads are shared out.
        """
        cuts = self.chunks or tuple(((0,),) * count for count in (m, k, n))
        of_m, of_k, of_n = (np.repeat(np.arange(len(blocks)), [len(each) for each in blocks]) for blocks in cuts)
        rows = 1 if self.stays in "bBkK" else len(self.table)  # of blocks of C that the table tells apart
        columns = 1 if self.stays in "aAkK" else len(self.table[0])
        ranks = self.ranks(m, k, n)
        a, b = (np.add.outer(np.arange(len(x)), np.arange(len(y))) for x, y in ((of_m, of_k), (of_k, of_n)))
        j = a % (of_m[:, None] + 1 if self.triangle else columns)
        readers = ranks[of_m[:, None], of_k, j], ranks[b % rows, of_k[:, None], of_n]
        at = [None if homes is None else homes_array(homes) for homes in self.homes[:2]]
        a, b = (
            reader if home is None else np.where(home < 0, reader, home)
            for home, reader in zip(at, readers, strict=True)
        )
        return a, b

    def lines(self, blocking: Blocking) -> list[tuple[list[int], int]]:
        """Return the lengths of the chains of a block of C, with the number of blocks of C that have such chains."""
        m, k, n = len(blocking.m), len(blocking.k), len(blocking.n)
        if self.c_stays:
            return [([k], blocking.whole.c_blocks)]
        by_line = self.table if self.stays in "akAK" else tuple(zip(*self.table, strict=True))
        each = {"k": blocking.whole.c_blocks, "a": n, "b": m}[self.stays.lower()]
        return [(list(Counter(line).values()), each) for line in by_line]

    @property
    def is_balanced(self) -> bool:
        """Whether ranks pass on some of what they hold, so that no other rank has much less work."""
        return self.stays.isupper()

    @property
    def title(self) -> str:
        """What stays, in words."""
        if self.stays not in FAMILIES:
            return f"C stays, on {self.stays}"
        names = {"k": "panels of A and B stay", "r": "C stays, by rows of A", "c": "C stays, by columns of B"}
        balanced = "" if self.stays.islower() else ", but for what balances the work"
        return names.get(self.stays.lower(), f"{self.stays.upper()} stays") + balanced

    @property
    def text(self) -> str:
        """What a plan's text says of it: ``2x2x1``, or ``k4`` if panels stay on four workers."""
        return self.stays if self.stays not in FAMILIES else f"{self.stays}{self.size}"


def candidates(
    blocking: Blocking,
    homes: Places,
    workers: int,
    one_chain: bool,
    chunks: tuple[Chunks, Chunks, Chunks] | None = None,
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
    chunks: tuple[Chunks, Chunks, Chunks] | None = None,
) -> Owners:
    """Return the owners of C by a grid of one layer, block-cyclic."""
    table = tuple(tuple(grid.owner(i, j) for j in range(len(blocking.n))) for i in range(len(blocking.m)))
    return Owners(grid.size, grid.text, table, homes, chunks=chunks, triangle=blocking.triangle)


def of_family(
    family: Family,
    blocking: Blocking,
    homes: Places,
    workers: int,
    chunks: tuple[Chunks, Chunks, Chunks] | None = None,
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
    held, work = {
        "k": (a.sum(axis=1) + (0 if blocking.triangle else b.sum(axis=2)), k),
        "r": (a.sum(axis=2), np.cumsum(m) if blocking.triangle else m),
        "c": (b.sum(axis=1), n),
        "a": (a.reshape(workers, -1), np.outer(m, k).ravel()),
        "b": (b.reshape(workers, -1), np.outer(k, n).ravel()),
    }[family.lower()]
    ranks = _shared_out(held, work, BALANCE if family.isupper() else math.inf)
    shape = {"k": (1, -1), "r": (-1, 1), "c": (1, -1), "a": (len(m), len(k)), "b": (len(k), len(n))}[family.lower()]
    table = ranks.reshape(shape)
    if family in "rcRC":
        table = np.broadcast_to(table, (len(m), len(n)))
    return Owners(workers, family, tuple(map(tuple, table.tolist())), homes, 0, chunks, blocking.triangle)


@lru_cache(maxsize=8)
def homes_array(homes: Homes) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return homes as an array; kept, because 200 x 200 of them take 2 ms, and a search asks some hundred times."""
    return np.array(homes, np.int64)


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

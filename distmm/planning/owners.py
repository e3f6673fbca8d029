"""Owners: which rank multiplies which blocks, by a grid, or by a table for operands that are in the workers' memory.

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

`distmm.planning.families` fills the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from distmm.planning.blocks import Blocking, ranges

# Edges of the chunks that each block along a dimension is made of.
Chunks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Grid:
    """`rows` x `columns` workers; block (i, j) of any matrix lives at ``(i % rows, j % columns)``: 2-D block-cyclic.

    ``A[i, p]`` and ``C[i, j]`` share a row of workers, ``B[p, j]`` and ``C[i, j]`` a column: each block of A is
    sent along one row of the grid and each block of B along one column, at most once to each worker. A batch index
    rotates the ranks, so that many small products spread over all workers. `shift` rotates them too, for a product that
    is computed again on other workers. A grid of one worker then uses a second worker.

    With several `layers`, each layer is such a grid for a part of k (split-K) and makes a partial sum of every block
    of C.

    `chunks` are as in `Owners`, and before them those along the batch. The chunks of a block live where the block does.
    """

    rows: int
    columns: int
    layers: int = 1
    shift: int = 0
    chunks: tuple[Chunks, ...] | None = None

    @property
    def text(self) -> str:
        """What a plan's text says of it."""
        return f"{self.rows}x{self.columns}x{self.layers}"

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.rows * self.columns * self.layers

    def owner(self, i: int, j: int, batch: tuple[int, ...] = (), layer: int = 0) -> int:
        """Rank of the worker at which block (i, j) lives, on a layer."""
        row, column = i % self.rows, j % self.columns
        rank = (layer * self.rows + row) * self.columns + column + sum(batch) + self.shift
        return rank % (max(self.size, 2) if self.shift else self.size)

    def lines(self, blocking: Blocking) -> list[tuple[Sequence[int], int]]:
        """Return the lengths of the chains of a block of C, with the number of blocks of C that have such chains."""
        parts = ranges(len(blocking.k), self.layers, blocking.panels)
        return [(list(map(len, parts)), blocking.whole.c_blocks)]

    @staticmethod
    def all_of(workers: int, layers: int = 1) -> tuple[Grid, ...]:
        """Every grid of exactly `workers` ranks in `layers` layers; none if `layers` does not divide `workers`."""
        cells, rest = divmod(workers, layers)
        return () if rest else tuple(Grid(r, cells // r, layers) for r in range(1, cells + 1) if cells % r == 0)


# Rank that holds each block of an operand, as rows of block columns; -1 for a block that is in no worker's memory.
Homes = tuple[tuple[int, ...], ...]


class Places(NamedTuple):
    """Homes of A and of B; None if no block of the operand is in memory.

    `alike` says that all of A is in memory, and that B is A itself, as in ``A @ A``, or its transpose, as in
    ``X.T @ X``: each block of B is then a block of A, of the same or of the exchanged indices.
    """

    a: Homes | None = None
    b: Homes | None = None
    alike: Literal["", "same", "transposed"] = ""

    @property
    def known(self) -> bool:
        """Whether blocks of A or of B are in memory."""
        return self.a is not None or self.b is not None


NOWHERE = Places()

# What stays, as a plan's text names it: C by block rows or by block columns, A, B, or panels of k. Capitals: balanced.
Family = Literal["r", "c", "a", "b", "k", "R", "C", "A", "B", "K"]
FAMILIES: tuple[Family, ...] = ("k", "r", "c", "a", "b", "K", "R", "C", "A", "B")


@dataclass(frozen=True)
class Owners:
    """The rank of every block product, and the ranks that hold the operands' blocks when the product begins.

    Attributes
    ----------
    size : int
        Number of workers.
    stays : str
        One of `FAMILIES`, or the text of a grid, ``"2x2x1"``.
    table : tuple of tuple of tuple of int
        Rank by (i, p, j). It has the length 1 along dimensions on which the rank does not depend.
    homes : Places
    fewest : int, optional
        The fewest bytes that any family moves from these homes, whatever its balance. None if this was not computed, or
        if no block is in memory: then one worker that loads all of them moves nothing.
    chunks : tuple of Chunks, optional
        If blocks are unions of the user's chunks: the edges of the chunks of each block, along m, k and n. `homes` are
        then those of the chunks.
    """

    size: int
    stays: str
    table: tuple[tuple[tuple[int, ...], ...], ...]
    homes: Places
    fewest: int | None = None
    chunks: tuple[Chunks, ...] | None = None

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
        plane = self.table[i % len(self.table)]
        line = plane[p % len(plane)]
        return line[j % len(line)]

    def ranks(self, m: int, k: int, n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """All ranks ``(m, k, n)``, for numbers of blocks along m, k and n."""
        return np.broadcast_to(np.array(self.table, np.int64), (m, k, n))

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

    def homes_of_chunks(
        self, m: int, k: int, n: int, triangle: bool
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Ranks of the chunks of A and of B, for m x k x n blocks; a chunk in no memory goes to a rank that reads it.

        Chunks of other numbers have other readers, so that loads are shared out. With `triangle`, only the blocks of C
        with ``i >= j`` are multiplied.
        """
        cuts = self.chunks or tuple(((0,),) * count for count in (m, k, n))
        of_m, of_k, of_n = (np.repeat(np.arange(len(blocks)), [len(each) for each in blocks]) for blocks in cuts)
        rows, columns = len(self.table), len(self.table[0][0])  # of blocks of C that the table tells apart
        ranks = self.ranks(m, k, n)
        a, b = (np.add.outer(np.arange(len(x)), np.arange(len(y))) for x, y in ((of_m, of_k), (of_k, of_n)))
        j = a % (of_m[:, None] + 1 if triangle else columns)
        readers = ranks[of_m[:, None], of_k, j], ranks[b % rows, of_k[:, None], of_n]
        at = [None if homes is None else homes_array(homes) for homes in self.homes[:2]]
        a, b = (
            reader if home is None else np.where(home < 0, reader, home)
            for home, reader in zip(at, readers, strict=True)
        )
        return a, b

    def lines(self, blocking: Blocking) -> list[tuple[list[int], int]]:
        """Return the lengths of the chains of a block of C, with the number of blocks of C that have such chains."""
        if self.c_stays:
            return [([len(blocking.k)], blocking.whole.c_blocks)]
        by_line = [line for plane in self.table for line in zip(*plane, strict=True)]
        each = blocking.whole.c_blocks // len(by_line)
        return [(list(Counter(line).values()), each) for line in by_line]

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


@lru_cache(maxsize=8)
def homes_array(homes: Homes) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return homes as an array; kept, because 200 x 200 of them take 2 ms, and a search asks some hundred times."""
    return np.array(homes, np.int64)

"""The grid of workers, and which of them owns which block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distmm.planning.blocks import Blocking, part_lengths


@dataclass(frozen=True)
class Grid:
    """`rows` x `columns` workers; block (i, j) of any matrix lives at ``(i % rows, j % columns)``: 2-D block-cyclic.

    ``A[i, p]`` and ``C[i, j]`` share a row of workers, ``B[p, j]`` and ``C[i, j]`` a column: each block of A is
    sent along one row of the grid and each block of B along one column, at most once to each worker. A batch index
    rotates the ranks, so that many small products spread over all workers. `shift` rotates them too, for a product that
    is computed again on other workers. A grid of one worker then uses a second worker.

    With several `layers`, each layer is such a grid for a part of k (split-K) and makes a partial sum of every block
    of C.
    """

    rows: int
    columns: int
    layers: int = 1
    shift: int = 0

    # A schedule reads it of `Owners`, too: blocks that are unions of chunks have owners as tables.
    chunks = None

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
        return [(part_lengths(len(blocking.k), self.layers, blocking.panels), blocking.whole.c_blocks)]

    @staticmethod
    def all_of(workers: int, layers: int = 1) -> tuple[Grid, ...]:
        """Every grid of exactly `workers` ranks in `layers` layers; none if `layers` does not divide `workers`."""
        cells, rest = divmod(workers, layers)
        return () if rest else tuple(Grid(r, cells // r, layers) for r in range(1, cells + 1) if cells % r == 0)

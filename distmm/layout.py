"""Where the blocks of a product are and go: bytes by rank, for a blocking on a grid. Pure.

Block indices that differ by a multiple of the grid have the same owner, so sums over residues are enough. In a
symmetric product block row i of A is needed by the workers of row ``i % rows`` of the grid, as A, and by those of
column ``i % columns``, as its transpose; a worker that needs it as both gets it once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distmm.geometry import Blocking, Grid, Problem, Wave, operand_batch

__all__ = ["Layout", "Traffic"]

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Traffic(NamedTuple):
    """Bytes of A and B by rank, for some steps of a wave.

    Attributes
    ----------
    received, sent : arrays of int
    homes : pair of arrays of int
        At home there, of A and of B; those of a symmetric product are all A's.
    both : array of int
        Of a symmetric product: needed there as A and as its transpose.
    """

    received: Ints
    sent: Ints
    homes: tuple[Ints, Ints]
    both: Ints


@dataclass(frozen=True)
class Layout:
    """Bytes by rank, for a blocking on a grid."""

    problem: Problem
    blocking: Blocking
    grid: Grid

    @cached_property
    def parts(self) -> tuple[tuple[range, ...], ...]:
        """Panels of each step, for each layer."""
        return self.blocking.parts(self.grid.layers)

    def c_bytes(self, wave: Wave, itemsize: int, layers: int) -> Ints:
        """Bytes of the blocks of C of a wave that each rank multiplies, on the first `layers` layers."""
        owned = np.zeros(self.grid.size, np.int64)
        area = self._areas(wave)
        for batch in self._batches(wave):
            size = self._matrices(batch, self.problem.batch) * itemsize
            for layer in range(layers):
                owned[self._ranks(batch, layer)] += area * size
        return owned

    def mirror_bytes(self, wave: Wave, itemsize: int) -> Ints:
        """Bytes of the mirror images of a wave's blocks, by the rank of their source.

        Those of a symmetric product are views of their sources, and take none; a conjugate needs memory of its own.
        """
        if self.problem.symmetry != "hermitian":
            return np.zeros(self.grid.size, np.int64)
        owned = self.c_bytes(wave, itemsize, 1)
        if wave.triangle:
            for batch in self._batches(wave):
                size = self._matrices(batch, self.problem.batch) * itemsize
                for i in wave.rows:
                    owned[self.grid.owner(i, i, batch)] -= self.blocking.m[i] ** 2 * size
        return owned

    @cached_property
    def busiest(self) -> int:
        """Blocks of C that the busiest rank multiplies."""
        whole = self.blocking.whole
        if not whole.triangle:
            return math.ceil(whole.c_blocks / (self.grid.rows * self.grid.columns))
        cells, counts = self._triangle(whole, np.ones(len(whole.rows), np.int64)), np.zeros(self.grid.size, np.int64)
        for batch in self._batches(whole):
            counts[self._ranks(batch, 0)] += cells
        return int(counts.max())

    def operand_bytes(self, wave: Wave, steps: slice = slice(None)) -> Traffic:
        """Bytes of A and B that each rank receives and sends for some steps of a wave, and those at home on it.

        A block comes from its home once to each rank that needs it.
        """
        if self.problem.symmetry is not None:
            return self._symmetric_bytes(wave, steps)
        received, sent, homes = (np.zeros(self.grid.size, np.int64) for _ in range(3))
        home_b = np.zeros(self.grid.size, np.int64)
        rows, columns, item = self.grid.rows, self.grid.columns, self.problem.dtype.itemsize
        heights, widths = self._sums(wave)
        down, across = np.arange(rows) * columns, np.arange(columns)
        for layer, part in enumerate(self.parts):
            chosen = part[steps]
            panels = np.arange(chosen[0].start, chosen[-1].stop)
            depth = self._depths[panels]
            by_column = np.bincount(panels % columns, depth, columns).astype(np.int64)
            by_row = np.bincount(panels % rows, depth, rows).astype(np.int64)
            for own, edges, lines, along, used, at_home, total in (
                (self.problem.a_batch, heights, down, across, np.count_nonzero(widths), by_column, homes),
                (self.problem.b_batch, widths, across, down, np.count_nonzero(heights), by_row, home_b),
            ):
                for at, shifts in self._users(wave, own).items():
                    needs = np.zeros(self.grid.size, bool)  # by rank: needs the blocks of line 0
                    for shift in shifts:
                        needs[(along[:used] + shift + layer * rows * columns) % self.grid.size] = True
                    home = (along + sum(at) + layer * rows * columns) % self.grid.size
                    size = edges * self._matrices(next(iter(shifts.values())), own) * item
                    there = (home[None] + lines[:, None]) % self.grid.size
                    users = (np.flatnonzero(needs)[None] + lines[:, None]) % self.grid.size
                    np.add.at(received, users, (size * depth.sum())[:, None])
                    received[there] -= np.outer(size, at_home * needs[home])
                    sent[there] += np.outer(size, at_home * (np.count_nonzero(needs) - needs[home]))
                    total[there] += np.outer(size, at_home)
        return Traffic(received, sent, (homes, home_b), np.zeros(self.grid.size, np.int64))

    def _symmetric_bytes(self, wave: Wave, steps: slice) -> Traffic:
        """Bytes of A for a wave of a symmetric product, where each block of A is its own partner's transpose too."""
        received, sent, homes, both = (np.zeros(self.grid.size, np.int64) for _ in range(4))
        rows, columns, item = self.grid.rows, self.grid.columns, self.problem.dtype.itemsize
        line = np.array(sorted({*wave.rows, *wave.columns}), np.int64)  # block rows of A that the wave needs
        every = np.arange(len(line))
        # C[i, j] of block row i are in columns of the grid from wave.columns.start on: as many as there are, or up to
        # the diagonal. Likewise C[r, i] of block column i, from the diagonal on.
        is_row, is_column = (np.isin(line, np.array(at)) for at in (wave.rows, wave.columns))
        across = np.where(is_row, (line + 1 if wave.triangle else wave.columns.stop) - wave.columns.start, 0)
        first = line if wave.triangle else np.full_like(line, wave.rows.start)
        down = np.where(is_column, wave.rows.stop - first, 0)
        as_a = (np.arange(columns) - wave.columns.start) % columns < across[:, None]
        as_b = (np.arange(rows) - first[:, None]) % rows < down[:, None]
        row, column = line % rows, line % columns
        twice = as_a[every, column] & as_b[every, row]
        once = as_b.copy()
        once[every, row] &= ~twice
        needed = as_a.copy()  # by the homes of the row's blocks
        needed[every, column] |= as_b[every, row]
        users = np.count_nonzero(as_a, axis=1) + np.count_nonzero(once, axis=1)
        a_cells = row[:, None] * columns + np.arange(columns)
        b_cells = np.arange(rows) * columns + column[:, None]
        edges = np.array(self.blocking.m, np.int64)[line]
        for layer, part in enumerate(self.parts):
            chosen = part[steps]
            panels = np.arange(chosen[0].start, chosen[-1].stop)
            depth = self._depths[panels]
            at_home = edges[:, None] * np.bincount(panels % columns, depth, columns).astype(np.int64)
            whole = (edges * depth.sum())[:, None]
            got, gave, there, doubled = (np.zeros(rows * columns, np.int64) for _ in range(4))
            np.add.at(got, a_cells, whole * as_a - at_home * needed)
            np.add.at(got, b_cells, whole * once)
            np.add.at(gave, a_cells, at_home * (users[:, None] - needed))
            np.add.at(there, a_cells, at_home)
            np.add.at(doubled, a_cells[every, column], whole[:, 0] * twice)
            for batch in self._batches(wave):
                size, ranks = self._matrices(batch, self.problem.batch) * item, self._ranks(batch, layer)
                for total, part_of_it in ((received, got), (sent, gave), (homes, there), (both, doubled)):
                    total[ranks] += part_of_it * size
        return Traffic(received, sent, (homes, np.zeros_like(homes)), both)

    def _ranks(self, batch: tuple[int, ...], layer: int) -> Ints:
        """Rank of each cell of the grid's rows and columns, for a batch block and a layer."""
        cells = self.grid.rows * self.grid.columns
        ranks: Ints = (np.arange(cells) + layer * cells + sum(batch)) % self.grid.size
        return ranks

    def _areas(self, wave: Wave) -> Ints:
        """Elements of the blocks of C of a wave that each cell of the grid multiplies."""
        if not wave.triangle:
            area: Ints = np.outer(*self._sums(wave)).ravel()
            return area
        return self._triangle(wave, np.array(self.blocking.m[wave.rows.start : wave.rows.stop], np.int64))

    def _triangle(self, wave: Wave, edges: Ints) -> Ints:
        """Sum of ``edges[i] * edges[j]`` over the blocks of a triangle, for each cell of the grid."""
        rows, columns = self.grid.rows, self.grid.columns
        at = np.arange(wave.rows.start, wave.rows.stop)
        widths = np.zeros((len(at), columns), np.int64)
        widths[np.arange(len(at)), at % columns] = edges
        areas = np.zeros((rows, columns), np.int64)
        np.add.at(areas, at % rows, edges[:, None] * np.cumsum(widths, axis=0))  # of block row i: the columns j <= i
        return areas.ravel()

    @cached_property
    def _depths(self) -> Ints:
        return np.array(self.blocking.k, np.int64)

    def _sums(self, wave: Wave) -> tuple[Ints, Ints]:
        """Rows of a wave's blocks on each row of the grid, and columns on each column."""
        rows, columns = self.grid.rows, self.grid.columns
        heights, widths = (
            np.bincount(np.arange(at.start, at.stop) % count, edges[at.start : at.stop], count).astype(np.int64)
            for at, edges, count in ((wave.rows, self.blocking.m, rows), (wave.columns, self.blocking.n, columns))
        )
        return heights, widths

    def _batches(self, wave: Wave) -> list[tuple[int, ...]]:
        return list(self.blocking.batches())[wave.batches.start : wave.batches.stop]

    def _users(self, wave: Wave, own: tuple[int, ...]) -> dict[tuple[int, ...], dict[int, tuple[int, ...]]]:
        """By batch block of an operand: the shifts of the ranks that use it, and a batch block of C with each."""
        users: defaultdict[tuple[int, ...], dict[int, tuple[int, ...]]] = defaultdict(dict)
        for batch in self._batches(wave):
            users[operand_batch(batch, own)][sum(batch) % self.grid.size] = batch
        return users

    def _matrices(self, index: tuple[int, ...], own: tuple[int, ...]) -> int:
        """Matrices in an operand's batch block: C's, along the dimensions that it has and does not broadcast."""
        offset = len(index) - len(own)
        edges = self.blocking.batch
        return math.prod(edges[offset + d][index[offset + d]] for d, length in enumerate(own) if length != 1)

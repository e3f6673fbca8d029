"""The bytes of a product that each worker owns, receives and sends, if its owners are a grid.

Blocks whose indices differ by a multiple of the grid's edges have the same owner, so sums over residues are enough.
Layers differ only in their depth. A batch index rotates the ranks. The figures are arrays ``(layers, rows, columns)``
of the grid, first for one matrix of batch block 0; nothing here loops over layers, ranks or blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from distmm.planning.blocks import Wave, are_even
from distmm.planning.grid_shares import Share, by_residue, share, symmetric_share, turned
from distmm.planning.layout import Ints, Layout, Traffic
from distmm.planning.owners import Grid


class Depths(NamedTuple):
    """Elements along k of each layer: of all panels ``(layers,)``, and of the panels with one residue modulo the grid.

    `by_row` is ``(layers, rows)``, `by_column` ``(layers, columns)``.
    """

    whole: Ints
    by_row: Ints
    by_column: Ints


class GridLayout(Layout[Grid]):
    """Bytes by rank, for a product and its schedule, in array arithmetic: a search looks at hundreds of schedules."""

    @cached_property
    def layers(self) -> int:
        """Layers that have a part of k."""
        return math.ceil(len(self.blocking.k) / self.blocking.part_panels(self.grid.layers))

    @cached_property
    def depth(self) -> int:
        """Elements along k of the deepest layer."""
        return int(self._depths(slice(None)).whole.max())

    def c_bytes(self, wave: Wave, itemsize: int, layers: int) -> Ints:
        """Bytes of the blocks of C of a wave that each rank multiplies, on the first `layers` layers."""
        return self._by_rank(wave, self._areas(wave) * itemsize, layers)

    def mirror_bytes(self, wave: Wave, itemsize: int) -> Ints:
        """Bytes of the mirror images of a wave's blocks, by the rank of their source.

        A mirror image in a symmetric product is a view of its source and takes none. A conjugate needs its own memory.
        """
        if self.problem.symmetry != "hermitian":
            return np.zeros(self.grid.size, np.int64)
        return self._by_rank(wave, (self._areas(wave) - self._on_diagonal(wave)) * itemsize, 1)

    def multiplied(self, wave: Wave, triangles: bool) -> float:
        """Multiply-adds of the busiest rank in a wave. Of blocks on the diagonal, a kernel may compute `triangles`."""
        halves = self._on_diagonal(wave) if triangles else 0
        return float(self._by_rank(wave, 2 * self._areas(wave) - halves, self.layers).max()) / 2 * self.depth

    def summed_bytes(self) -> int:
        """Bytes of the partial sums of C that are sent."""
        return (self.layers - 1) * self.blocking.c_elements * self.problem.accumulator_bytes

    def received_sums(self) -> int:
        """Return 0. Sums of layers are not counted: they come when the last products are done, from one other rank."""
        return 0

    def sums_at_once(self, wave: Wave) -> Ints:
        """Bytes of the partial sums of other ranks that each rank may hold in a wave: one for each chain."""
        return self.c_bytes(wave, self.problem.accumulator_bytes, self.layers)

    def chains_abreast(self, wave: Wave) -> int:
        """Chains of a wave that a rank runs, if these are shared out evenly."""
        return math.ceil(wave.c_blocks / self.grid.rows / self.grid.columns)

    def first_products(self) -> float:
        """Largest share of the transfers of a worker's first step that its first products wait for.

        A GPU waits for its first block row of A and block column of B, and receives the others while it multiplies. On
        a grid of one column, no blocks of A are sent; on a grid of one row, none of B.
        """
        wave, grid = self.schedule.kinds_of_waves[0][0], self.grid
        rows, columns = len(wave.rows) // grid.rows, len(wave.columns) // grid.columns
        sent = [lines for lines, receivers in ((rows, grid.columns), (columns, grid.rows)) if receivers > 1]
        return 1 / max(1, min(sent, default=1))

    def chains(self, wave: Wave) -> Ints:
        """Blocks of C of a wave that each rank multiplies."""
        counts = np.zeros(self._shape, np.int64)
        counts[: self.layers] = self._cells(wave, np.ones_like(self._edges[0]), np.ones_like(self._edges[2]))
        by_rank: Ints = counts.ravel()
        for blocks in self.blocking.wave_batches(wave):
            by_rank = turned(by_rank, blocks, np.ones(len(blocks), np.int64))
        return by_rank

    def windows(self, length: int, resident: bool = True) -> Iterator[slice]:
        """Ranges of `length` steps: with even panels one for each arrangement of the panels' homes, else all.

        A rank that is the home of the first panels receives no copies of them, but copies of later panels. If no
        operand is `resident`, a rank holds the blocks that it needs wherever their homes are.
        """
        found = super().windows(length, resident)
        if not are_even(self.blocking.k):
            return found
        # Later ranges repeat the first ones, or are less deep.
        if self.problem.symmetry is None and not resident and not self.blocking.batch:
            return islice(found, 1)
        # Homes of A depend on the column alone if it is the only operand.
        lines = math.lcm(self.grid.rows if self.problem.symmetry is None else 1, self.grid.columns)
        return islice(found, lines // math.gcd(lines, self.blocking.panels))

    def operand_bytes(self, wave: Wave, steps: slice = slice(None)) -> Traffic:
        """Bytes of A and B that each rank receives and sends for some steps of a wave, and those at home on it.

        A block comes from its home once to each rank that needs it.
        """
        depths, figures = self._depths(steps), []
        for (needed, at_home), own, depth in zip(
            self._shares(wave),
            (self.problem.a_batch, self.problem.b_batch),
            (depths.by_column[:, None], depths.by_row[..., None]),
            strict=False,
        ):
            of_matrix = at_home[:, None] * depth
            for away, lines in enumerate(needed):
                if lines.any():
                    of_matrix += np.roll(depths.whole, away)[:, None, None] * lines[:, None]
            figures.append(self._of_all_batches(of_matrix.reshape(4, -1), wave, own))
        a, b, *_ = *figures, np.zeros_like(figures[0])
        return self._traffic(a[:3], b[:3], a[3])

    def _shares(self, wave: Wave) -> list[Share]:
        """Who needs A, and B if it is a second operand. Kept: ranges of steps differ in depth alone."""
        if wave not in self._known:
            if self.problem.symmetry is not None:
                self._known[wave] = [symmetric_share(self.grid, wave, self._edges[0])]
            else:
                heights, widths = self._sums(wave, self._edges[0], self._edges[2])
                a, b = (
                    self._needs(wave, self.problem.a_batch, 1, widths),
                    self._needs(wave, self.problem.b_batch, self.grid.columns, heights),
                )
                self._known[wave] = [share(self.grid, heights, a), share(self.grid, widths, b, across=True)]
        return self._known[wave]

    @cached_property
    def _known(self) -> dict[Wave, list[Share]]:
        return {}

    def _needs(self, wave: Wave, own: tuple[int, ...], apart: int, others: Ints) -> Ints:
        """Whether each rank needs the blocks of an operand on the first line of the grid, on layer 0.

        `own` are the operand's batch dimensions, and ranks of a line are so far `apart`. As many of them as have any of
        the `others`, elements of the other operand's blocks, from the first one on, have blocks of C.
        """
        needs: Ints = np.zeros(self.grid.size, np.int64)
        needs[: apart * np.count_nonzero(others) : apart] = 1
        for length, blocks in zip(self._aligned(own), self.blocking.wave_batches(wave), strict=True):
            if length == 1:  # all batch blocks of C read the same blocks, and are on other ranks
                needs = np.minimum(turned(needs, blocks, np.ones(len(blocks), np.int64)), 1)
        return needs

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.grid.layers, self.grid.rows, self.grid.columns

    def _depths(self, steps: slice) -> Depths:
        """Elements along k of some steps."""
        count, length, panels = len(self.blocking.k), self.blocking.part_panels(self.grid.layers), self.blocking.panels
        chosen = np.arange(length)[slice(*(None if x is None else x * panels for x in (steps.start, steps.stop)))]
        layer = np.arange(self.grid.layers)[:, None]
        panel = layer * length + chosen
        depth = np.where(panel < count, self._edges[1][np.minimum(panel, count - 1)], 0)

        def alike(lines: int) -> Ints:
            return by_residue(layer * lines + panel % lines, depth, self.grid.layers * lines).reshape(-1, lines)

        return Depths(depth.sum(axis=1), alike(self.grid.rows), alike(self.grid.columns))

    def _areas(self, wave: Wave) -> Ints:
        """Elements of the blocks of C of a wave that each cell of the grid multiplies."""
        return self._cells(wave, self._edges[0], self._edges[2])

    def _on_diagonal(self, wave: Wave) -> Ints:
        """Elements of a wave's blocks on the diagonal of C, for each cell of the grid."""
        areas = np.zeros((self.grid.rows, self.grid.columns), np.int64)
        i = np.arange(wave.rows.start, wave.rows.stop if wave.triangle else wave.rows.start)
        np.add.at(areas, (i % self.grid.rows, i % self.grid.columns), self._edges[0][i] ** 2)
        return areas

    def _cells(self, wave: Wave, heights: Ints, widths: Ints) -> Ints:
        """Sum of ``heights[i] * widths[j]`` over the blocks (i, j) of C of a wave, for each cell of the grid."""
        if not wave.triangle:
            return np.outer(*self._sums(wave, heights, widths))
        rows, columns = self.grid.rows, self.grid.columns
        at = np.arange(wave.rows.start, wave.rows.stop)
        across = np.zeros((len(at), columns), np.int64)
        across[np.arange(len(at)), at % columns] = widths[at]
        cells = np.zeros((rows, columns), np.int64)
        np.add.at(cells, at % rows, heights[at][:, None] * np.cumsum(across, axis=0))  # of row i: the columns j <= i
        return cells

    def _sums(self, wave: Wave, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        """Sum of the heights of a wave's block rows on each row of the grid, and of the widths on each column."""
        i, j = (np.arange(at.start, at.stop) for at in (wave.rows, wave.columns))
        rows, columns = self.grid.rows, self.grid.columns
        return by_residue(i % rows, heights[i], rows), by_residue(j % columns, widths[j], columns)

    def _by_rank(self, wave: Wave, cells: Ints, layers: int) -> Ints:
        """Figures of C in a wave, by rank: for one matrix they are `cells`, on the first `layers` layers."""
        figures = np.zeros(self._shape, np.int64)
        figures[:layers] = cells
        return self._of_all_batches(figures.ravel(), wave, self.problem.batch)

    def _aligned(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """Lengths of an operand's batch dimensions, with those of C that it lacks as 1."""
        return (1,) * (len(self.blocking.batch) - len(own)) + own

    def _of_all_batches(self, figures: Ints, wave: Wave, own: tuple[int, ...]) -> Ints:
        """Sum `figures` ``(..., ranks)`` of the matrix of batch block 0 over all matrices of an operand in a wave."""
        for length, blocks, edges in zip(
            self._aligned(own), self.blocking.wave_batches(wave), self.blocking.batch, strict=True
        ):
            if length != 1:
                figures = turned(figures, blocks, np.array(edges[blocks.start : blocks.stop], np.int64))
        return figures

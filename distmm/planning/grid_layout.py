"""The bytes of a product that each worker owns, receives and sends, if its owners are a grid.

Blocks whose indices differ by a multiple of the grid's edges have the same owner, so sums over residues are enough.
Layers differ only in their depth. A batch index rotates the ranks. The figures are arrays ``(layers, rows, columns)``
of the grid, first for one matrix of batch block 0; nothing here loops over layers, ranks or blocks.

In a symmetric product block row i of A is needed by the workers of row ``i % rows`` of the grid, as A, and by those of
column ``i % columns``, as its transpose; a worker that needs it as both gets it once.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distmm.planning.blocks import Wave, are_even
from distmm.planning.layout import Ints, Layout, Traffic, counted
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

    def windows(self, length: int, resident: bool = True) -> list[slice]:
        """Ranges of `length` steps: the deepest one for each arrangement of the homes of their panels.

        A rank that is the home of the first panels receives no copies of them, but copies of later panels. If no
        operand is `resident`, a rank holds the blocks that it needs wherever their homes are.
        """
        k, panels, count = self.blocking.k, self.blocking.panels, self.schedule.steps
        lines = math.lcm(self.grid.rows, self.grid.columns)
        period = lines // math.gcd(lines, panels)
        starts = range(max(1, count - length + 1))
        if are_even(k):  # later ranges repeat the first ones, or are less deep
            alike = not resident and self.problem.symmetry is None and not self.blocking.batch
            return [slice(s, s + length) for s in starts[: 1 if alike else period]]
        if self.layers > 1:  # one of two equally deep ranges may be deeper on another layer
            return [slice(s, s + length) for s in starts]
        ends = np.cumsum((0, *k))
        last = len(k)
        deepest: dict[int, tuple[int, int]] = {}
        for s in starts:
            depth = int(ends[min(last, (s + length) * panels)] - ends[min(last, s * panels)])
            deepest[s % period] = max(deepest.get(s % period, (0, 0)), (depth, s))
        return [slice(s, s + length) for _, s in deepest.values()]

    def operand_bytes(self, wave: Wave, steps: slice = slice(None)) -> Traffic:
        """Bytes of A and B that each rank receives and sends for some steps of a wave, and those at home on it.

        A block comes from its home once to each rank that needs it.
        """
        depths = self._depths(steps)
        ranks = np.arange(self.grid.size).reshape(self._shape)
        if self.problem.symmetry is not None:
            a, both = self._symmetric_operand(wave, ranks, depths)
            return self._traffic(a, np.zeros_like(a), both)
        heights, widths = self._sums(wave, self._edges[0], self._edges[2])
        a, b = (
            self._of_all_batches(counted(self._needs(wave, own, homes, others), homes, held), wave, own)
            for own, homes, others, held in (
                (self.problem.a_batch, ranks, widths, heights[:, None] * depths.by_column[:, None]),
                (self.problem.b_batch, ranks.swapaxes(1, 2), heights, widths[:, None] * depths.by_row[:, None]),
            )
        )
        return self._traffic(a, b, np.zeros(self.grid.size, np.int64))

    def _needs(self, wave: Wave, own: tuple[int, ...], lines: Ints, others: Ints) -> Ints:
        """Whether each rank needs the blocks of each line of the grid: ``(layers, lines, ranks)``.

        A *line* is a row of the grid for A, whose blocks are needed along it, and a column for B.

        Parameters
        ----------
        wave : Wave
        own : tuple of int
            The operand's batch dimensions.
        lines : array of int ``(layers, lines, along)``
            Ranks of each line, at which its blocks are.
        others : array of int ``(along,)``
            Elements of the other operand's blocks: as many workers of a line as have any, from the first one on, have
            blocks of C.
        """
        needs: Ints = np.zeros(self.grid.size, np.int64)  # by rank: the blocks of line 0 on layer 0
        needs[lines[0, 0, : np.count_nonzero(others)]] = 1
        for length, blocks in zip(self._aligned(own), self.blocking.wave_batches(wave), strict=True):
            if length == 1:  # all batch blocks of C read the same blocks, and are on other ranks
                needs = np.minimum(turned(needs, blocks, np.ones(len(blocks), np.int64)), 1)
        return needs[(np.arange(self.grid.size) - lines[..., :1]) % self.grid.size]

    def _symmetric_operand(self, wave: Wave, ranks: Ints, depths: Depths) -> tuple[Ints, Ints]:
        """Elements of A as by `counted`, and those that each rank needs both as A and as its transpose."""
        rows, columns = self.grid.rows, self.grid.columns
        line = np.array(sorted({*wave.rows, *wave.columns}), np.int64)  # block rows of A that the wave needs
        layer, every = np.arange(self.grid.layers)[:, None], np.arange(len(line))
        # C[i, j] of block row i are in columns of the grid from wave.columns.start on: as many as there are, or up to
        # the diagonal. Likewise C[r, i] of block column i, from the diagonal on.
        is_row, is_column = ((at.start <= line) & (line < at.stop) for at in (wave.rows, wave.columns))
        across = np.where(is_row, (line + 1 if wave.triangle else wave.columns.stop) - wave.columns.start, 0)
        first = line if wave.triangle else np.full_like(line, wave.rows.start)
        down = np.where(is_column, wave.rows.stop - first, 0)
        as_a = (np.arange(columns) - wave.columns.start) % columns < across[:, None]
        as_b = (np.arange(rows) - first[:, None]) % rows < down[:, None]
        row, column, edges = line % rows, line % columns, self._edges[0][line]
        needs = np.zeros((len(layer), len(line), *self._shape), np.int64)
        needs[layer, every, layer, row] = as_a
        needs[layer, every, layer, :, column] |= as_b
        both = np.zeros(self.grid.size, np.int64)
        twice = as_a[every, column] & as_b[every, row]
        np.add.at(both, ranks[:, row, column], depths.whole[:, None] * edges * twice)
        held, batch = edges[:, None] * depths.by_column[:, None], self.problem.batch
        a = counted(needs.reshape(*needs.shape[:2], -1), ranks[:, row], held)
        return self._of_all_batches(a, wave, batch), self._of_all_batches(both, wave, batch)

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


def by_residue(at: Ints, figures: Ints, count: int) -> Ints:
    """Sum the figures with the same place below `count`. Exact: sums of lengths are less than 2**53."""
    return np.bincount(at.ravel(), figures.ravel(), count).astype(np.int64)


def turned(figures: Ints, blocks: range, weights: Ints) -> Ints:
    """Sum of ``weights[i] * np.roll(figures, blocks[i], axis=-1)``: a batch index rotates the ranks."""
    size = figures.shape[-1]
    by_turn = by_residue(np.arange(blocks.start, blocks.stop) % size, weights, size)
    total = np.zeros_like(figures)
    for turn in np.flatnonzero(by_turn):
        total += by_turn[turn] * np.roll(figures, turn, axis=-1)
    return total

"""Which ranks of a grid need the blocks of A and of B: elements across, for each element of depth along k.

In a symmetric product block row i of A is needed by the workers of row ``i % rows`` of the grid, as A, and by those of
column ``i % columns``, as its transpose; a worker that needs it as both gets it once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distmm.planning.blocks import Wave
from distmm.planning.layout import Ints
from distmm.planning.owners import Grid


class Share(NamedTuple):
    """Who needs an operand, in elements across: received, sent, at home, and needed in two places (an axis of four).

    Attributes
    ----------
    needed : array of int ``(layers, 4, rows, columns)``
        For each element of depth of layer 0, as if a rank received all that it needs. With batches, ranks need blocks
        of other layers.
    at_home : array of int ``(4, rows, columns)``
        What to add for each element of depth whose home is the rank: it does not receive that, and sends it to others.
    """

    needed: Ints
    at_home: Ints


def share(grid: Grid, sizes: Ints, needs: Ints, across: bool = False) -> Share:
    """Return who needs A, or B, of two operands.

    A *line* is a row of the grid for A, whose blocks are needed along it, and a column for B.

    Parameters
    ----------
    grid : Grid
    sizes : array of int ``(lines,)``
        Elements across of the blocks of each line.
    needs : array of int ``(ranks,)``
        Whether a rank needs the blocks of the first line on layer 0.
    across : bool
        Whether the lines are columns.
    """
    cells = np.arange(grid.rows * grid.columns).reshape(grid.rows, grid.columns)
    lines = cells.T if across else cells
    users = (lines[:, :1] + np.flatnonzero(needs)) % grid.size
    needed = np.zeros((grid.layers, 4, *cells.shape), np.int64)
    elements = np.broadcast_to(sizes[:, None], users.shape)
    needed[:, 0] = by_residue(users, elements, grid.size).reshape(grid.layers, *cells.shape)
    here = needs[lines[0]]
    at_home = sizes[:, None] * np.stack([-here, needs.sum() - here, 0 * here + needs.any(), 0 * here])[:, None]
    return Share(needed, at_home.swapaxes(1, 2) if across else at_home)


def symmetric_share(grid: Grid, wave: Wave, edges: Ints) -> Share:
    """Return who needs A in a symmetric product, whose blocks have these edges along m."""
    rows, columns = grid.rows, grid.columns
    line = np.array(sorted({*wave.rows, *wave.columns}), np.int64)  # block rows of A that the wave needs
    # C[i, j] of block row i are in columns of the grid from wave.columns.start on: as many as there are, or up to the
    # diagonal. Likewise C[r, i] of block column i, from the diagonal on.
    is_row, is_column = ((at.start <= line) & (line < at.stop) for at in (wave.rows, wave.columns))
    across = np.where(is_row, (line + 1 if wave.triangle else wave.columns.stop) - wave.columns.start, 0)
    first = line if wave.triangle else np.full_like(line, wave.rows.start)
    down = np.where(is_column, wave.rows.stop - first, 0)
    as_a = (np.arange(columns) - wave.columns.start) % columns < across[:, None]
    as_b = (np.arange(rows) - first[:, None]) % rows < down[:, None]
    row, column, high, every = line % rows, line % columns, edges[line], np.arange(len(line))
    twice = as_a[every, column] & as_b[every, row]
    users = as_a.sum(axis=1) + as_b.sum(axis=1) - twice
    needed, at_home = np.zeros((grid.layers, 4, rows, columns), np.int64), np.zeros((4, rows, columns), np.int64)
    of_rows = np.zeros((rows, columns), np.int64)
    np.add.at(of_rows, row, high[:, None] * as_a)
    np.add.at(needed[0, 0].T, column, high[:, None] * as_b)
    np.add.at(needed[0, 3], (row, column), high * twice)
    np.add.at(at_home[0], (row, column), -high * (as_b[every, row] & ~twice))
    np.add.at(at_home[1], row, (high * users)[:, None])
    np.add.at(at_home[2], row, (high * (users > 0))[:, None])
    needed[0, 0] += of_rows - needed[0, 3]
    at_home[0] -= of_rows
    at_home[1] += at_home[0]
    return Share(needed, at_home)


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

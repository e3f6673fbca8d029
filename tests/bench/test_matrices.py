"""Where the blocks of the benchmark's resident matrices are."""

from __future__ import annotations

from collections import Counter

import pytest
from experiment.matrices import home

from distmm.planning.owners import Grid

GRIDS = [Grid(1, 1), Grid(1, 2), Grid(2, 1), Grid(1, 3), Grid(2, 2), Grid(2, 4), Grid(4, 2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("count", [4, 12])
def test_a_row_or_column_of_the_grid_holds_what_it_multiplies_in_equal_shares(grid: Grid, count: int) -> None:
    blocks = [(i, j) for i in range(count) for j in range(count)]
    ranks = [[row * grid.columns + column for column in range(grid.columns)] for row in range(grid.rows)]
    for operand, lines in (("A", ranks), ("B", list(zip(*ranks, strict=True)))):
        held = Counter(home(operand, i, j, (count, count), grid) for i, j in blocks)
        for line in lines:
            shares = [held[rank] for rank in line]
            assert max(shares) - min(shares) <= (sum(shares) % len(shares) > 0)
            assert min(shares) > 0
    for i, j in blocks:
        assert home("A", i, j, (count, count), grid) // grid.columns == i % grid.rows
        assert home("B", i, j, (count, count), grid) % grid.columns == j % grid.columns


@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(2, 1), Grid(2, 2)], ids=str)
def test_each_rank_has_blocks_of_its_own_for_each_step(grid: Grid) -> None:
    for p in range(4):
        for operand, line in (("A", [(i, p) for i in range(4)]), ("B", [(p, j) for j in range(4)])):
            assert {home(operand, i, j, (4, 4), grid) for i, j in line} == set(range(grid.size))

"""What `GridLayout` says of the bytes of each worker, against the definition: block by block and rank by rank."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm.planning.blocks import Blocking, even_edges
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.grid_layout import GridLayout
from distmm.planning.owners import Grid
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem, operand_batch
from distmm.planning.schedule import Schedule
from tests.tables import number_of

F4 = np.dtype("f4")
CPU = ClusterSpec(workers=4, memory=4 * 10**9, device="cpu", rate=3e10, link=1e9)

BATCHES = [
    ((), ()), ((3,), (3,)), ((5,), ()), ((5,), (1,)), ((2, 1), (1, 3)), ((3, 2), (3, 2)), ((1, 4, 3), (4, 1)),
]  # fmt: skip


@settings(max_examples=number_of(80))
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 6)),
    st.sampled_from(BATCHES),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([slice(None), slice(0, 1), slice(0, 2)]),
)
def test_bytes_are_those_of_the_blocks_that_leave_home(
    shape: tuple[int, int, int],
    cuts: tuple[int, int, int],
    blocks: tuple[int, int, int],
    batches: tuple[tuple[int, ...], tuple[int, ...]],
    matrices: int,
    panels: int,
    steps: slice,
) -> None:
    """Against the definition: each block of C needs its row of A and its column of B, from their homes."""
    grid = Grid(*shape)
    problem = Problem(blocks[0] * 3 - 1, blocks[1] * 2 - 1, blocks[2] * 5 - 2, F4, *batches)
    edges = (even_edges(problem.m, 3), even_edges(problem.k, 2), even_edges(problem.n, 5))
    blocking = Blocking(*edges, tuple(even_edges(x, matrices) for x in problem.batch), panels)
    layout = GridLayout(problem, Schedule(blocking, grid))

    def size(own: tuple[int, ...], at: tuple[int, ...], rows: int, columns: int) -> int:
        """Bytes of a block of an operand, or of C, at a batch block of it."""
        cut = blocking.batch[len(blocking.batch) - len(own) :]
        return rows * columns * 4 * math.prod(1 if n == 1 else e[i] for n, e, i in zip(own, cut, at, strict=True))

    parts = blocking.parts(grid.layers)
    assert (layout.layers, layout.schedule.steps) == (len(parts), max(map(len, parts)))
    assert layout.depth == max(sum(blocking.k[p] for step in part for p in step) for part in parts)
    for wave in blocking.waves(cuts, (grid.rows, grid.columns)):
        needs, homes, owned = set(), {}, Counter[int]()
        for batch, i, j in blocking.c_indices(wave):
            a, b = operand_batch(batch, problem.a_batch), operand_batch(batch, problem.b_batch)
            for layer, part in enumerate(parts):
                owner = grid.owner(i, j, batch, layer)
                owned[owner] += size(problem.batch, batch, blocking.m[i], blocking.n[j])
                for p in (p for step in part[steps] for p in step):
                    for block, home, nbytes in (
                        (
                            ("A", a, i, p),
                            grid.owner(i, p, a, layer),
                            size(problem.a_batch, a, edges[0][i], edges[1][p]),
                        ),
                        (
                            ("B", b, p, j),
                            grid.owner(p, j, b, layer),
                            size(problem.b_batch, b, edges[1][p], edges[2][j]),
                        ),
                    ):
                        homes[block] = home, nbytes
                        needs.add((owner, block))
        received, sent, at_home = (Counter[int]() for _ in range(3))
        for owner, block in needs:
            home, nbytes = homes[block]
            received[owner] += nbytes * (owner != home)
            sent[home] += nbytes * (owner != home)
        for home, nbytes in homes.values():
            at_home[home] += nbytes
        traffic = layout.operand_bytes(wave, steps)
        for counted, figures in (
            (received, traffic.received),
            (sent, traffic.sent),
            (at_home, sum(traffic.homes)),
            (owned, layout.c_bytes(wave, 4, layout.layers)),
        ):
            assert [counted[rank] for rank in range(grid.size)] == list(figures)


@pytest.mark.parametrize(("rows", "columns", "blocks"), [(2, 2, 8), (4, 2, 8), (8, 8, 16), (1, 4, 4)])
def test_square_products_move_exactly_the_2d_bound(rows: int, columns: int, blocks: int) -> None:
    n = 32 * blocks
    edges = even_edges(n, 32)
    c = Plan(Problem(n, n, n, F4), Schedule(Blocking(edges, edges, edges), Grid(rows, columns)), CPU).cost
    assert c.bytes_moved == c.bytes_bound == blocks**2 * (rows + columns - 2) * 32 * 32 * 4


@pytest.mark.parametrize(("grid", "waited"), [(Grid(1, 2), 4), (Grid(2, 1), 4), (Grid(2, 2), 2), (Grid(4, 1), 4)])
def test_on_gpus_only_the_transfers_of_the_first_products_are_waited_for(grid: Grid, waited: int) -> None:
    problem, spec = Problem(4096, 4096, 4096, F4), replace(CPU, workers=grid.size, device="cuda", rate=1e9, link=1e9)
    plan = Plan(problem, Schedule(Blocking(*[(1024,) * 4] * 3, panels=4), grid), spec, operands=("resident",) * 2)
    transfers = plan.cost.seconds - replace(plan, cluster=replace(spec, link=math.inf)).cost.seconds
    most = max(GridLayout(problem, plan.schedule).operand_bytes(plan.waves[0]).received) / 1e9
    assert transfers == pytest.approx(most / waited)

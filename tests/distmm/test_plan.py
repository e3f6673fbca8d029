from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm.cost import ClusterSpec, cost, operand_bytes_moved
from distmm.errors import DoesNotFitError, InputError
from distmm.geometry import Blocking, Grid, Problem, even_edges, operand_batch
from distmm.plan import PRECISIONS, TILE, make_plan
from distmm.runtime.cluster import RATES

F4 = np.dtype("f4")
CPU = ClusterSpec(workers=4, memory=4 * 10**9, device="cpu", rate=3e10, link=1e9)
sizes = st.integers(1, 3000)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, sizes, st.sampled_from([1, 2, 3, 4, 8, 16]), st.sampled_from(["f4", "f8", "i8", "c16"]))
def test_plans_cover_the_product_with_blocks_on_all_ranks(m: int, k: int, n: int, workers: int, dtype: str) -> None:
    plan = make_plan(Problem(m, k, n, np.dtype(dtype)), replace(CPU, workers=workers))
    blocking = plan.blocking
    assert (sum(blocking.m), sum(blocking.k), sum(blocking.n)) == (m, k, n)
    assert plan.grid.size == workers
    assert plan.cost.tasks == len(list(blocking.c_indices())) * len(blocking.steps)
    assert str(plan)
    assert plan.rows()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([((), ()), ((3,), (3,)), ((3,), ()), ((3,), (1,)), ((2, 1), (1, 2))]),
)
def test_bytes_moved_are_those_of_the_blocks_that_leave_home(
    rows: int, columns: int, bm: int, bk: int, bn: int, batches: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    grid = Grid(rows, columns)
    problem = Problem(bm * 3, bk * 2, bn * 5, F4, *batches)
    blocking = Blocking((3,) * bm, (2,) * bk, (5,) * bn, tuple((1,) * x for x in problem.batch))
    moved = set()
    for batch, i, j in blocking.c_indices():
        owner = grid.owner(i, j, batch)
        for p in range(bk):
            a, b = operand_batch(batch, problem.a_batch), operand_batch(batch, problem.b_batch)
            if grid.owner(i, p, a) != owner:
                moved.add((owner, 3 * 2 * 4, "A", a, i, p))
            if grid.owner(p, j, b) != owner:
                moved.add((owner, 2 * 5 * 4, "B", b, p, j))
    expected: Counter[int] = Counter()
    for rank, size, *_ in moved:
        expected[rank] += size
    assert operand_bytes_moved(problem, blocking, grid, (4, 4)) == expected


@pytest.mark.parametrize(("rows", "columns", "blocks"), [(2, 2, 8), (4, 2, 8), (8, 8, 16), (1, 4, 4)])
def test_square_products_move_exactly_the_2d_bound(rows: int, columns: int, blocks: int) -> None:
    n = 32 * blocks
    edges = even_edges(n, 32)
    c = cost(Problem(n, n, n, F4), Blocking(edges, edges, edges), Grid(rows, columns), CPU)
    assert c.bytes_moved == c.bytes_bound == blocks**2 * (rows + columns - 2) * 32 * 32 * 4


def test_plan_refuses_what_cannot_fit_and_says_what_would() -> None:
    plan = make_plan(Problem(100_000, 100_000, 100_000, F4), CPU)
    with pytest.raises(
        DoesNotFitError,
        match=r"needs .* GB on each of 4 workers, 4 GB is free.*short by .* GB; use about \d+ workers",
    ):
        plan.validate()


def test_plan_that_fits_is_not_refused() -> None:
    make_plan(Problem(10_000, 10_000, 10_000, F4), CPU).validate()


def test_blocks_shrink_until_they_fit() -> None:
    roomy = make_plan(Problem(20_000, 20_000, 20_000, F4), CPU)
    tight = make_plan(Problem(20_000, 20_000, 20_000, F4), replace(CPU, memory=1400 * 10**6))
    tight.validate()
    assert np.prod(tight.block_shape) < np.prod(roomy.block_shape)


def test_small_products_stay_whole() -> None:
    assert make_plan(Problem(100, 100, 100, F4), CPU).cost.tasks == 1


def test_users_blocks_are_kept_and_short_tasks_take_several_panels() -> None:
    edges = even_edges(1024, 32)
    plan = make_plan(Problem(1024, 1024, 1024, F4), CPU, blocking=Blocking(edges, edges, edges))
    assert (plan.blocking.m, plan.blocking.k, plan.blocking.n) == (edges, edges, edges)
    assert plan.blocking.panels > 1


def test_long_tasks_take_one_panel() -> None:
    edges = even_edges(8192, 2048)
    assert make_plan(Problem(8192, 8192, 8192, F4), CPU, blocking=Blocking(edges, edges, edges)).blocking.panels == 1


def test_blocks_are_multiples_of_the_files_chunks() -> None:
    plan = make_plan(Problem(5000, 5000, 5000, F4), CPU, multiples=(300, 200, 500))
    assert plan.block_shape[0] % 300 == plan.block_shape[1] % 200 == plan.block_shape[2] % 500 == 0


@pytest.mark.parametrize("edges", [(0, 1, 1), (1, -1, 1), (1, 1), (1.5, 1, 1)])
def test_block_edges_that_are_not_positive_are_refused(edges: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="positive"):
        make_plan(Problem(10, 10, 10, F4), CPU, edges=edges)


def test_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"exact.*highest"):
        make_plan(Problem(10, 10, 10, F4), CPU, precision="exact")


def test_planner_and_kernels_agree_on_the_tile_and_the_precisions() -> None:
    from distmm_kernels import config

    assert (TILE, PRECISIONS) == (config.TILE, config.PRECISIONS)


def test_the_planner_knows_a_rate_for_every_kernel_and_type() -> None:
    from distmm_kernels.candidates import CANDIDATES
    from distmm_kernels.config import compute_dtype

    for candidate in CANDIDATES:
        for dtype in candidate.dtypes:
            assert RATES[candidate.name][compute_dtype(dtype).str[1:]] > 0


def test_a_cluster_without_workers_is_refused() -> None:
    with pytest.raises(InputError, match="no workers"):
        make_plan(Problem(10, 10, 10, F4), replace(CPU, workers=0))

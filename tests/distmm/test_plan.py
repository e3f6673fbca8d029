from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm.cost import ClusterSpec
from distmm.errors import DoesNotFitError, InputError
from distmm.geometry import Blocking, Grid, Problem, even_edges, operand_batch
from distmm.layout import Layout
from distmm.plan import PRECISIONS, TILE, Plan, make_plan
from distmm.runtime.cluster import RATES

F4 = np.dtype("f4")
CPU = ClusterSpec(workers=4, memory=4 * 10**9, device="cpu", rate=3e10, link=1e9)


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.sampled_from([1, 2, 3, 8, 60, 256, 4096]),
    st.sampled_from(["f2", "f4", "f8", "i8", "c16"]),
    st.sampled_from([(), (5,), (3, 40)]),
    st.sampled_from(["workers", "host", "out"]),
)
def test_plans_cover_the_product_and_their_text_gives_them_back(
    m: int, k: int, n: int, workers: int, dtype: str, batch: tuple[int, ...], result: str
) -> None:
    problem = Problem(m, k, n, np.dtype(dtype), batch, batch[:1] and (1,) * len(batch))
    spec = replace(CPU, workers=workers, memory=10**11, device="cuda", host_memory=10**11)
    plan = make_plan(problem, spec, result=result)
    blocking = plan.blocking
    assert (sum(blocking.m), sum(blocking.k), sum(blocking.n)) == (m, k, n)
    assert tuple(map(sum, blocking.batch)) == batch
    assert plan.grid.size == workers
    chains = sum(wave.c_blocks for wave in plan.waves)
    parts = blocking.parts(plan.grid.layers)
    assert chains == blocking.c_blocks
    assert [p for part in parts for step in part for p in step] == list(range(len(blocking.k)))
    assert plan.cost.tasks == chains * (sum(map(len, parts)) + len(parts) - 1)
    assert plan.cost.bytes_moved >= 0
    assert plan.cost.peak_bytes > 0
    assert make_plan(problem, spec, text=str(plan), result=result) == plan
    assert dict(plan.rows())["plan"] == str(plan)
    if plan.shortfall:
        with pytest.raises(DoesNotFitError, match=r"short by .* GB; use about \d+ GPUs"):
            plan.validate()
    else:
        plan.validate()


@pytest.mark.parametrize(
    "text", ["", "g2x1 b8x8x8 p1 w1 l2", "g2x1x1 b8x8 p1 w1 l2", "g2x1x1 b8x8x0 p1 w1 l2", "b8x8x8"]
)
def test_a_text_that_is_no_plan_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="g2x1x1 b8192x8192x8192 p1 w1 l2"):
        make_plan(Problem(8, 8, 8, F4), CPU, text=text)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([((), ()), ((3,), (3,)), ((3,), ()), ((3,), (1,)), ((2, 1), (1, 2))]),
)
def test_bytes_moved_are_those_of_the_blocks_that_leave_home(
    shape: tuple[int, int, int],
    cuts: tuple[int, int],
    bm: int,
    bk: int,
    bn: int,
    batches: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    grid = Grid(*shape)
    problem = Problem(bm * 3 - 1, bk * 2 - 1, bn * 5 - 2, F4, *batches)
    edges = (even_edges(problem.m, 3), even_edges(problem.k, 2), even_edges(problem.n, 5))
    blocking = Blocking(*edges, tuple((1,) * x for x in problem.batch))
    layout = Layout(problem, blocking, grid)
    for wave in blocking.waves((1, *cuts), (grid.rows, grid.columns)):
        moved, used, owned = set(), set(), Counter[int]()
        for batch, i, j in blocking.c_indices(wave):
            a, b = operand_batch(batch, problem.a_batch), operand_batch(batch, problem.b_batch)
            for layer, steps in enumerate(blocking.parts(grid.layers)):
                owner = grid.owner(i, j, batch, layer)
                owned[owner] += blocking.m[i] * blocking.n[j] * 4
                for p in (p for step in steps for p in step):
                    for name, at, row, column, size in (
                        ("A", a, i, p, blocking.m[i] * blocking.k[p] * 4),
                        ("B", b, p, j, blocking.k[p] * blocking.n[j] * 4),
                    ):
                        home = grid.owner(row, column, at, layer)
                        used.add((home, size, name, at, row, column))
                        if home != owner:
                            moved.add((owner, home, size, name, at, row, column))
        received, sent, homes, _ = layout.operand_bytes(wave)
        expected = [Counter[int]() for _ in range(3)]
        for owner, home, size, *_ in moved:
            expected[0][owner] += size
            expected[1][home] += size
        for home, size, *_ in used:
            expected[2][home] += size
        for counted, figures in zip(expected, (received, sent, sum(homes)), strict=True):
            assert [counted[rank] for rank in range(grid.size)] == list(figures)
        layers = len(blocking.parts(grid.layers))
        assert [owned[rank] for rank in range(grid.size)] == list(layout.c_bytes(wave, 4, layers))


@pytest.mark.parametrize(("rows", "columns", "blocks"), [(2, 2, 8), (4, 2, 8), (8, 8, 16), (1, 4, 4)])
def test_square_products_move_exactly_the_2d_bound(rows: int, columns: int, blocks: int) -> None:
    n = 32 * blocks
    edges = even_edges(n, 32)
    c = Plan(Problem(n, n, n, F4), Blocking(edges, edges, edges), Grid(rows, columns), CPU).cost
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
    tight = make_plan(Problem(20_000, 20_000, 20_000, F4), replace(CPU, memory=700 * 10**6))
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

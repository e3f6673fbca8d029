from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import distmm
from distmm.errors import DoesNotFitError, InputError
from distmm.planning import candidates
from distmm.planning.blocks import Blocking, cut, even_edges
from distmm.planning.cluster_spec import SCHEDULER_SECONDS, ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.precision import PRECISIONS
from distmm.planning.problem import Problem
from distmm.planning.schedule import LOOKAHEAD
from distmm.planning.search import TILE, checked_edges, make_plan
from distmm.planning.time_model import TimeModel
from tests.tables import number_of

F4 = np.dtype("f4")
CPU = ClusterSpec(workers=4, memory=4 * 10**9, device="cpu", rate=3e10, link=1e9)


@settings(max_examples=10)
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
    assert plan.schedule.tasks == chains * (sum(map(len, parts)) + len(parts) - 1)
    assert plan.cost.bytes_moved >= plan.cost.bytes_bound >= 0
    assert plan.peak.worker > 0
    assert make_plan(problem, spec, text=str(plan), result=result) == plan
    assert dict(plan.rows())["plan"] == str(plan)
    if plan.shortfall:
        with pytest.raises(DoesNotFitError, match=r"short by .* GB; use about \d+ GPUs"):
            plan.validate()
    else:
        plan.validate()


@pytest.mark.parametrize(
    "text",
    ["", "g2x1 b8x8x8 p1 w1 l2", "g2x1x1 b8x8 p1 w1 l2", "g2x1x1 b8x8x0 p1 w1 l2", "b8x8x8",
     "g100000x100000x1 b8x8x8 p1 w1 l2"],
)  # fmt: skip
def test_a_text_that_is_no_plan_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="g2x1x1 b8192x8192x8192 p1 w1 l2"):
        make_plan(Problem(8, 8, 8, F4), CPU, text=text)


@pytest.mark.minutes
@pytest.mark.parametrize(
    ("problem", "workers", "memory"),
    [
        (Problem(300, 2**18, 300, F4), 12, 10**10),
        (Problem(100, 4096, 100, F4), 4, 30_000),
        (Problem(3000, 1000, 40_000, F4, (7,), ()), 32, 10**8),
        (Problem(20_000, 500, 20_000, F4, (), (), "symmetric"), 4, 10**8),
    ],
)
def test_the_plan_chosen_is_the_best_of_all_though_few_are_costed(problem: Problem, workers: int, memory: int) -> None:
    def score(plan: Plan) -> tuple[float, float]:
        seconds = max(plan.cost.seconds, plan.schedule.tasks * SCHEDULER_SECONDS / 0.3)
        return plan.shortfall, seconds * (1 + 0.01 * plan.lookahead)

    spec = replace(CPU, workers=workers, memory=memory)
    best = math.inf, math.inf
    several = next(candidates.waves(problem, spec, stays=False))
    for lengths in (candidates.STEPS, *((steps,) for steps in candidates.DEEPER_STEPS)):
        for waves in several:
            fitted = best[0] == 0
            for s in candidates.free(
                problem, spec, (TILE, TILE, TILE), waves, lengths, LOOKAHEAD, ("loaded", "loaded")
            ):
                p = Plan(problem, s, spec, result="out")
                assert p.least_seconds <= p.cost.seconds
                best = min(best, score(p))
            if fitted:  # twice as many waves as fit are tried, for fewer and deeper tasks may be faster
                break
        if best[0] == 0:  # more steps are tried where nothing fits
            break
    assert score(make_plan(problem, spec, result="out")) == best


@pytest.mark.minutes
def test_few_plans_of_a_small_c_with_a_deep_k_are_costed(monkeypatch: pytest.MonkeyPatch) -> None:
    costed = []
    predict = TimeModel.predict
    monkeypatch.setattr(TimeModel, "predict", lambda model: costed.append(1) or predict(model))
    plan = make_plan(Problem(512, 2**24, 512, F4), replace(CPU, workers=4096))
    assert plan.grid.layers > 8
    assert len(costed) < 200  # of 1,600 that there are


def test_plan_refuses_what_cannot_fit_and_says_what_would() -> None:
    plan = make_plan(Problem(100_000, 100_000, 100_000, F4), CPU)
    with pytest.raises(
        DoesNotFitError,
        match=r"needs .* GB on each of 4 workers, 4 GB is free.*short by .* GB; use about \d+ workers",
    ):
        plan.validate()
    with pytest.raises(DoesNotFitError, match=r"0 B is free there: .*; a worker has almost none: end what") as caught:
        make_plan(Problem(1000, 1000, 1000, F4), replace(CPU, memory=0)).validate()
    assert "use about" not in str(caught.value)


def test_blocks_shrink_until_they_fit() -> None:
    roomy = make_plan(Problem(20_000, 20_000, 20_000, F4), CPU)
    tight = make_plan(Problem(20_000, 20_000, 20_000, F4), replace(CPU, memory=700 * 10**6))
    tight.validate()
    assert np.prod(tight.block_shape) < np.prod(roomy.block_shape)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_deep_k_is_cut_until_it_fits(workers: int) -> None:
    problem, spec = Problem(10, 10**9, 10, np.dtype("f8")), replace(CPU, workers=workers, memory=3 * 10**8)
    assert make_plan(problem, spec, blocking=cut(problem, (10, 10**5, 10))).shortfall == 0
    make_plan(problem, spec).validate()


@pytest.mark.parametrize(
    ("problem", "memory"),
    [
        (Problem(10**6, 10**6, 10**6, F4), 476 * 10**6),
        (Problem(1, 10**7, 10**7, F4), 476 * 10**6),
        (Problem(10**7, 1, 10**5, F4), 10**8),
        (Problem(10**6, 0, 10**6, F4), 476 * 10**6),
        (Problem(10**5, 10**5, 10**5, F4, symmetry="symmetric"), 476 * 10**5),
    ],
)
def test_a_plan_for_a_file_keeps_to_little_memory_whatever_the_shape(problem: Problem, memory: int) -> None:
    plan = make_plan(problem, replace(CPU, workers=1, memory=memory), result="out")
    plan.validate()
    assert plan.peak.worker <= memory


def test_the_copies_of_blocks_that_a_kernel_splits_are_counted() -> None:
    spec = distmm.gpus(1, "H100").spec(F4, "tf32x3", "highest")
    assert spec.copied == 1.0
    text = "g1x1x1 b4096x2048x8192 p1 w1 l2"
    with_copies, without = (
        make_plan(Problem(8192, 8192, 8192, F4), replace(spec, copied=copied), text=text).peak.worker
        for copied in (1.0, 0.0)
    )
    assert with_copies - without == min(spec.threads, 2) * 2048 * 8192 * 4


sizes = st.integers(0, 12).map(lambda doublings: 10 << doublings)


@pytest.mark.minutes
@settings(max_examples=number_of(40))
@given(
    st.tuples(sizes, st.integers(0, 26).map(lambda doublings: 10 << doublings), sizes),
    st.tuples(st.sampled_from([100, 1000, 5000]), st.sampled_from([100, 10**4, 10**6]), st.sampled_from([100, 3000])),
    st.integers(1, 8),
    st.integers(8, 9),
    st.sampled_from(["workers", "out"]),
)
def test_where_blocks_given_by_hand_fit_the_planner_finds_some_that_do(
    shape: tuple[int, int, int], edges: tuple[int, int, int], workers: int, memory: int, result: str
) -> None:
    edges = tuple(map(min, edges, shape))
    assume(math.prod(-(-size // edge) for size, edge in zip(shape, edges, strict=True)) < 20_000)
    problem, spec = Problem(*shape, F4), replace(CPU, workers=workers, memory=10**memory)
    assume(not make_plan(problem, spec, blocking=cut(problem, edges), result=result).shortfall)
    assert make_plan(problem, spec, result=result).shortfall == 0


def test_small_products_stay_whole() -> None:
    assert make_plan(Problem(100, 100, 100, F4), CPU).schedule.tasks == 1


def test_users_blocks_are_kept_and_short_tasks_take_several_panels() -> None:
    edges = even_edges(1024, 32)
    plan = make_plan(Problem(1024, 1024, 1024, F4), CPU, blocking=Blocking(edges, edges, edges))
    assert (plan.blocking.m, plan.blocking.k, plan.blocking.n) == (edges, edges, edges)
    assert plan.blocking.panels > 1


def test_long_tasks_take_one_panel() -> None:
    edges = even_edges(8192, 2048)
    assert make_plan(Problem(8192, 8192, 8192, F4), CPU, blocking=Blocking(edges, edges, edges)).blocking.panels == 1


def test_a_short_chain_on_gpus_is_one_task_if_its_first_blocks_arrive_in_time() -> None:
    two = replace(CPU, workers=2, memory=10**11, device="cuda", rate=6.5e14, threads=2)
    edges = even_edges(65536, 16384)

    def panels(link: float, count: int = 4) -> int:
        problem, k = Problem(65536, count * 16384, 65536, np.dtype("f2")), (16384,) * count
        spec, resident = replace(two, link=link), ("resident",) * 2
        return make_plan(problem, spec, blocking=Blocking(edges, k, edges), operands=resident).blocking.panels

    assert panels(1e11) == 4
    assert panels(3e10) == 1
    assert panels(1e11, candidates.SHORT_CHAIN + 1) <= (candidates.SHORT_CHAIN + 1) // 4
    two = replace(two, rate=6.5e13)
    assert panels(1e11) == 1


def test_gpus_load_a_step_earlier_where_loads_and_products_take_about_the_same_time() -> None:
    problem = Problem(46080, 46080, 46080, np.dtype("f2"))
    two = replace(CPU, workers=2, memory=7 * 10**10, device="cuda", rate=6.5e14, link=1e11, load=5e10, threads=2)
    ahead = make_plan(problem, two, result="out")
    assert ahead.lookahead == LOOKAHEAD + 1
    late = replace(ahead, schedule=replace(ahead.schedule, lookahead=LOOKAHEAD))
    assert late.cost.seconds > 1.1 * ahead.cost.seconds
    assert make_plan(problem, replace(two, rate=6.5e13), result="out").lookahead == LOOKAHEAD


def test_blocks_are_multiples_of_the_files_chunks() -> None:
    plan = make_plan(Problem(5000, 5000, 5000, F4), CPU, multiples=(300, 200, 500))
    assert plan.block_shape[0] % 300 == plan.block_shape[1] % 200 == plan.block_shape[2] % 500 == 0


@pytest.mark.parametrize("edges", [(0, 1, 1), (1, -1, 1), (1, 1), (1.5, 1, 1)])
def test_block_edges_that_are_not_positive_are_refused(edges: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="positive"):
        checked_edges(edges, Problem(10, 10, 10, F4))


def test_planner_and_kernels_agree_on_the_tile_and_the_precisions() -> None:
    from distmm_kernels import config

    assert (TILE, PRECISIONS) == (config.TILE, config.PRECISIONS)


def test_a_cluster_without_workers_is_refused() -> None:
    with pytest.raises(InputError, match="no workers"):
        make_plan(Problem(10, 10, 10, F4), replace(CPU, workers=0))


def test_rows_say_how_many_steps_there_are_and_how_many_panels_they_have() -> None:
    problem, said = Problem(40, 60, 40, F4), {}
    for panels in (1, 2, 8):
        for waves in (1, 4):
            plan = make_plan(problem, CPU, text=f"g1x1x1 b20x20x20 p{panels} w{waves} l2")
            said[panels, waves] = dict(plan.rows())["blocks"].partition("4 blocks of C")[2]
    assert said == {
        (1, 1): ", 3 steps", (1, 4): ", in 4 waves of 3 steps",
        (2, 1): ", 2 steps of up to 2 panels each", (2, 4): ", in 4 waves of 2 steps of up to 2 panels each",
        (8, 1): ", 1 step of 3 panels", (8, 4): ", in 4 waves of 1 step of 3 panels",
    }  # fmt: skip


def test_a_plan_shows_its_table_where_python_shows_values() -> None:
    plan = make_plan(Problem(40, 60, 40, F4), CPU)
    label, value = plan.rows()[-1]
    assert repr(plan).splitlines()[-1] == f"{label:11} {value}"
    assert (label, value) == ("plan", str(plan))

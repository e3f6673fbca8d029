"""What products cost on GPUs whose C leaves them: it goes block after block, while products run if there are any."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm.planning import candidates
from distmm.planning.blocks import cut
from distmm.planning.cluster_spec import ClusterSpec, Residence
from distmm.planning.owners import Grid
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import Schedule
from distmm.planning.search import make_plan
from distmm.planning.time_model import HOST_START_SECONDS, INSERT_SECONDS, START_SECONDS
from tests.tables import number_of

BF16, F4 = np.dtype(ml_dtypes.bfloat16), np.dtype("f4")
H200 = ClusterSpec(1, 115 * 10**9, "cuda", rate=6.8e14, link=5e10, load=5e10, threads=3, granule=64)
F4_H200 = replace(H200, rate=2e14, prepared=1.0)
RESIDENT: tuple[Residence, Residence] = ("resident", "resident")


def square(n: int, dtype: np.dtype = BF16) -> Problem:
    return Problem(n, n, n, dtype)


def seconds(problem: Problem, cluster: ClusterSpec, text: str, result: str = "out", **how: object) -> float:
    return make_plan(problem, cluster, text=text, result=result, **how).cost.seconds


@pytest.mark.parametrize("rate", [6.8e14, 1e14])
def test_blocks_of_one_wave_leave_one_after_the_other_while_the_last_products_run(rate: float) -> None:
    text, cluster = "g1x1x1 b32768x4096x16384 p1 w1 l2", replace(H200, rate=rate)
    stays, leaves = (seconds(square(65536), cluster, text, where, operands=RESIDENT) for where in ("workers", "out"))
    product, block = 2 * 32768 * 4096 * 16384 / rate, 2 * 32768 * 16384 / cluster.load
    finished = [(i - 7) * product for i in range(8)]  # of the 8 blocks, before and at the end of the last step
    left = -math.inf
    for at in finished:
        left = max(left, at) + block
    assert leaves - stays == pytest.approx(left + HOST_START_SECONDS)


def test_a_worker_has_its_own_blocks_alone_to_send() -> None:
    def late(workers: int, grid: str) -> float:
        cluster, text = replace(H200, workers=workers), f"g{grid} b16384x4096x16384 p1 w1 l2"
        stays, leaves = (
            seconds(square(65536), cluster, text, where, operands=RESIDENT) for where in ("workers", "host")
        )
        return leaves - stays

    product, block = 2 * 16384 * 4096 * 16384 / H200.rate, 2 * 16384**2 / H200.load
    assert late(1, "1x1x1") - late(4, "2x2x1") == pytest.approx(12 * (block - product))


def test_c_of_earlier_waves_leaves_while_the_next_one_is_made() -> None:
    def late(waves: str) -> float:
        text, cluster = f"g1x1x1 b8192x4096x8192 p1 {waves} l2", replace(H200, threads=32)
        stays, leaves = (seconds(square(65536), cluster, text, to, operands=RESIDENT) for to in ("workers", "out"))
        return leaves - stays

    product, block = 2 * 8192 * 4096 * 8192 / H200.rate, 2 * 8192**2 / H200.load
    assert late("w1") - late("w2x2") == pytest.approx(48 * (block - product))  # of 64 blocks, 16 are in the last wave


def test_blocks_of_earlier_waves_leave_beside_the_products_of_the_next() -> None:
    one, four = (
        seconds(square(65536), H200, f"g1x1x1 b16384x4096x16384 p1 {waves} l2", operands=RESIDENT)
        for waves in ("w1", "w2x2")
    )
    product, block = 2 * 16384 * 4096 * 16384 / H200.rate, 2 * 16384**2 / H200.load
    assert one - four == pytest.approx((16 - 4) * (block - product), abs=0.05)  # and fewer tasks are made first


def test_the_way_of_c_bounds_a_product_with_little_arithmetic_and_loads_go_beside_it() -> None:
    problem = Problem(131072, 2048, 131072, F4)
    c = make_plan(problem, replace(F4_H200, threads=8), text="g1x1x1 b16384x2048x16384 p1 w4x4 l2", result="out").cost
    storing, loading = 4 * 131072**2 / 5e10, 4 * 5 * 2048 * 131072 / 5e10
    assert c.bound_by == "storing"
    assert storing < c.seconds < storing + loading


def test_mirror_images_leave_too() -> None:
    problem = replace(square(65536), symmetry="symmetric")
    text = "g1x1x1 b16384x8192x16384 p1 w1 l2"
    whole = seconds(problem, H200, text, "out", operands=RESIDENT)
    lower = seconds(problem, H200, text, "host", operands=RESIDENT)
    assert whole - lower > 0.5 * (6 * 2 * 16384**2 / H200.load)


def test_products_of_the_last_step_begin_when_its_blocks_are_loaded() -> None:
    slow = replace(H200, load=1e10)
    deep, shallow = (f"g1x1x1 b32768x{k}x32768 p1 w1 l2" for k in (16384, 4096))
    of_one_step = [2 * 65536 * k * 65536 / slow.rate for k in (16384, 4096)]
    more_tasks = 12 * 8 * INSERT_SECONDS  # of a step: 2 loads of A, 2 of B, 4 products
    late, early = (seconds(square(65536), slow, text, "workers") for text in (deep, shallow))
    assert late - early == pytest.approx(of_one_step[0] - of_one_step[1] - more_tasks)


def test_the_planner_hides_the_way_of_c_behind_deeper_steps() -> None:
    plan = make_plan(square(65536), H200, result="out")
    m, k, n = plan.block_shape
    assert 2 * m * k * n / H200.rate > 2 * m * n / H200.load
    assert plan.cost.seconds < 0.95 * seconds(square(65536), H200, "g1x1x1 b32768x4096x16384 p1 w1 l2")


@pytest.mark.parametrize("result", ["out", "host", "workers"])
def test_more_waves_are_made_where_they_pay(result: str) -> None:
    """In one wave 69 GB of sums leave no room for deep steps, and 16 blocks of 4.3 GB leave at the end."""
    plan = make_plan(square(131072, F4), F4_H200, result=result)
    plan.validate()
    assert len(plan.waves) == (2 if result == "out" else 1)
    if result == "out":
        assert plan.cost.seconds < 0.98 * make_plan(square(131072, F4), F4_H200, result="host").cost.seconds


def test_where_the_way_of_c_takes_next_to_nothing_one_number_of_waves_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, free = [], candidates.free
    monkeypatch.setattr(candidates, "free", lambda *args, **how: tried.append(args[3]) or free(*args, **how))
    make_plan(Problem(2048, 2**21, 2048, F4), F4_H200, result="out")
    assert tried == [(1, 1)]
    make_plan(Problem(65536, 65536, 65000, F4), F4_H200, result="out")
    assert tried == [(1, 1), (1, 1), (1, 2)]


@settings(max_examples=number_of(150), deadline=None)
@given(
    st.tuples(*[st.integers(1, 3000)] * 3),
    st.tuples(*[st.integers(1, 900)] * 3),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 3),
    st.integers(2, 4),
    st.sampled_from(["workers", "host", "out"]),
    st.sampled_from([("loaded", "loaded"), ("resident", "loaded"), ("whole", "resident"), RESIDENT]),
    st.sampled_from([((), ()), ((3,), ()), ((5, 2), (1, 2))]),
    st.booleans(),
    st.tuples(st.floats(1e8, 1e13), st.floats(1e5, 1e11), st.integers(1, 6)),
)
def test_the_lower_bound_of_seconds_is_one_and_counts_the_waves(
    shape: tuple[int, int, int],
    edges: tuple[int, int, int],
    sides: tuple[int, int, int],
    waves: tuple[int, int],
    panels: int,
    lookahead: int,
    result: str,
    operands: tuple[Residence, Residence],
    batches: tuple[tuple[int, ...], tuple[int, ...]],
    symmetric: bool,
    machine: tuple[float, float, int],
) -> None:
    (m, k, n), (rows, columns, layers), (rate, load, threads) = shape, sides, machine
    problem = Problem(m, k, n, F4, *batches)
    if symmetric:
        problem, layers, waves = Problem(m, k, m, F4, symmetry="symmetric"), 1, (waves[0], waves[0])
        edges = (edges[0], edges[1], edges[0])
    cluster = ClusterSpec(rows * columns * layers, 10**12, "cuda", rate, 1e10, load, threads=threads)
    schedule = Schedule(cut(problem, edges, panels), Grid(rows, columns, layers), (1, *waves), lookahead)
    plan = Plan(problem, schedule, cluster, operands=operands, result=result)
    assert plan.least_seconds <= plan.cost.seconds
    assert schedule.wave_count == len(plan.waves)


@pytest.mark.parametrize("n", [1000, 8192, 16384])
def test_arrays_of_the_client_on_the_gpu_that_multiplies_are_one_task(n: int) -> None:
    plan = make_plan(square(n, F4), replace(F4_H200, load=1e12), result="out")
    start = START_SECONDS + HOST_START_SECONDS  # of several tasks
    assert plan.schedule.tasks == 1
    assert plan.cost.seconds < 2 * n**3 / F4_H200.rate + start

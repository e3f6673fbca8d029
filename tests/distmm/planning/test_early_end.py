"""A run that ends early loses little: waves are short beside its walltime, and what cannot be finished is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm.errors import DoesNotFitError
from distmm.planning.blocks import cut
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.early_end import WAVE_SHARE, largest_share
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan

F8 = np.dtype("f8")
CPU = ClusterSpec(workers=1, memory=4 * 10**9, device="cpu", rate=3.4e10, link=1e9, load=1.2e9)
GPU = ClusterSpec(workers=8, memory=10**11, device="cuda", rate=4e13, link=5e10, load=1e10, threads=3)
DEEP = Problem(5000, 160_000, 5000, F8)


def lost(plan: Plan, walltime: float, slower: float) -> float:
    """Most that a run of this length loses of its work, if all takes `slower` times as long as predicted."""
    blocks = sum(wave.c_blocks for wave in plan.waves)
    ends, now = [0.0], 0.0
    for wave in plan.waves:
        now += slower * plan.cost.seconds * wave.c_blocks / blocks
        ends.append(now)
    finished = max(end for end in ends if end <= walltime)
    return (min(walltime, now) - finished) / walltime


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.4])
def test_a_deep_product_loses_a_fifth_of_its_walltime_at_most(slower: float) -> None:
    whole = make_plan(DEEP, CPU, result="out")
    assert len(whole.waves) == 1
    assert lost(whole, 120, slower) == 1  # the plan without a walltime finishes all of C at its end
    plan = make_plan(DEEP, CPU, result="out", run_seconds=120)
    assert lost(plan, 120, slower) <= 0.2
    assert plan.cost.seconds < 1.25 * whole.cost.seconds


@settings(max_examples=8, deadline=None)
@given(
    *[st.integers(500, 300_000)] * 3,
    st.sampled_from([CPU, replace(CPU, workers=6), GPU]),
    st.sampled_from([None, "symmetric"]),
    st.floats(0.01, 1),
)
def test_waves_take_a_seventh_of_a_run_at_most(
    m: int, k: int, n: int, cluster: ClusterSpec, symmetry: None, share: float
) -> None:
    problem = Problem(m, k, n if symmetry is None else m, F8, symmetry=symmetry)
    whole = make_plan(problem, cluster, result="out")
    run = max(60.0, share * whole.cost.seconds)
    plan = make_plan(problem, cluster, result="out", run_seconds=run)
    if whole.wave_seconds <= WAVE_SHARE * run:
        assert str(plan) == str(whole)
    if not whole.shortfall:
        assert plan.shortfall == 0
        assert plan.wave_seconds <= WAVE_SHARE * run


def test_a_plan_that_finishes_no_block_in_a_run_is_refused_with_what_would_do() -> None:
    plan = make_plan(DEEP, CPU, blocking=cut(DEEP, (5000, 20_000, 5000)), result="out", run_seconds=60)
    said = r"stopped after 60 s, and by then this plan has finished no block of C: its first ones take about 2\d\d s, "
    with pytest.raises(DoesNotFitError, match=said + r".*more time.*about \d+ workers instead of 1, or smaller blocks"):
        plan.validate_run()
    make_plan(DEEP, CPU, result="out", run_seconds=60).validate_run()
    replace(plan, run_seconds=None).validate_run()


def test_a_reduced_product_is_finished_by_rows_of_blocks() -> None:
    schedule = make_plan(DEEP, CPU, text="g1x1x1 b625x20000x625 p1 w4x2 l2", result="out").schedule
    assert largest_share(schedule, by_rows=False) == 1 / 8
    assert largest_share(schedule, by_rows=True) == 1 / 4


def test_a_plan_says_what_a_stop_loses_and_which_workers_have_nothing_to_do() -> None:
    plan = make_plan(DEEP, CPU, result="out", run_seconds=120)
    assert dict(plan.rows())["a stop"].startswith(f"loses the work of about {plan.wave_seconds:.2g} s")
    assert "without work" not in dict(plan.rows())
    few = make_plan(DEEP, replace(CPU, workers=4), text="g2x2x1 b5000x20000x2500 p1 w1 l2", result="out")
    assert few.idle_workers == 2
    assert dict(few.rows())["without work"].startswith("2 of 4 have no block of C")

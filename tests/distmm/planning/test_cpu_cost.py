"""What plans cost on CPU clusters, where the same cores multiply, load, send and run Dask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan

N = 16384
PROBLEM = Problem(N, N, N, np.dtype("f4"))
CPU = ClusterSpec(workers=1, memory=430_000_000, device="cpu", rate=1.4e11, link=1e9, load=2.4e9, threads=2)


def planned(cluster: ClusterSpec, text: str | None = None) -> Plan:
    return make_plan(PROBLEM, cluster, multiples=(1024, 1024, 1024), result="out", text=text)


def test_nothing_hides_behind_arithmetic() -> None:
    text = "g1x1x1 b2048x1024x2048 p1 w2x4 l2"
    slow = replace(CPU, load=CPU.load / 10)
    # Each of the eight waves reads half of A and a quarter of B.
    read = 8 * (1 / 2 + 1 / 4) * 4 * N**2
    more = planned(slow, text).cost.seconds - planned(CPU, text).cost.seconds
    np.testing.assert_allclose(more, read / slow.load - read / CPU.load, rtol=1e-6)


def test_fewer_and_deeper_tasks_are_worth_more_waves_than_it_needs_to_fit() -> None:
    first_that_fits = planned(CPU, "g1x1x1 b2048x1024x2048 p1 w2x4 l2")
    best = planned(CPU)
    assert not best.shortfall
    assert len(best.waves) == 2 * len(first_that_fits.waves)
    assert best.schedule.tasks == first_that_fits.schedule.tasks / 4
    assert best.cost.seconds < first_that_fits.cost.seconds


def test_a_wave_has_a_chain_for_each_thread() -> None:
    one, two = (planned(CPU, f"g1x1x1 b4096x2048x{n} p1 w4x4 l2") for n in (4096, 2048))
    assert one.cost.seconds > 1.5 * two.cost.seconds
    assert planned(CPU).waves[0].c_blocks >= CPU.threads

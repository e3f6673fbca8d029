"""The planner's closed formulas against the definition, on products small enough to count every block."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm.planning.blocks import Blocking, even_edges
from distmm.planning.cluster_spec import ClusterSpec, Residence, Result
from distmm.planning.owners import Grid
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import Schedule
from tests.distmm.planning.brute_force import BruteForce
from tests.tables import number_of

F4, F2 = np.dtype("f4"), np.dtype("f2")
BATCHES = [((), ()), ((3,), (3,)), ((5,), ()), ((2, 1), (1, 3))]
RESIDENCES: list[tuple[Residence, Residence]] = [
    ("loaded", "loaded"), ("resident", "loaded"), ("loaded", "whole"), ("resident", "resident"),
    ("kept", "kept"), ("loaded", "kept"), ("made", "resident"), ("made", "kept"),
]  # fmt: skip

RESULTS: list[tuple[Result, bool]] = [
    ("workers", False),
    ("workers", True),
    ("out", False),
]  # and whether C is streamed


@st.composite
def plans(draw: st.DrawFn, even: bool = False) -> Plan:
    """Draw any schedule of a small product; `even`: all blocks are alike, and so are all workers."""
    rows, columns, layers = (draw(st.integers(1, most)) for most in (3, 3, 2))
    symmetric = not even and draw(st.booleans())
    counts = [draw(st.integers(1, most)) for most in (5, 7, 5)]
    panels, lookahead, threads = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ragged = (0, 0, 0)
    if even:
        counts = [counts[0] * rows, panels * math.lcm(rows, columns) * layers * counts[1], counts[2] * columns]
    else:
        ragged = tuple(draw(st.integers(0, 2)) for _ in range(3))
    m, k, n = (count * 3 - rest for count, rest in zip(counts, ragged, strict=True))
    cuts = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    a_batch, b_batch = ((), ()) if even or symmetric else draw(st.sampled_from(BATCHES))
    if symmetric:
        n, cuts, layers = m, (cuts[0], cuts[0]), 1
    problem = Problem(m, k, n, draw(st.sampled_from([F4, F2])), a_batch, b_batch, "symmetric" if symmetric else None)
    edges = [even_edges(size, 3) for size in (m, k, n)]
    if not even and draw(st.booleans()):  # chunks as users like them
        edges = [tuple(draw(st.permutations([*each, 1, 5]))) for each in edges]
        edges[2] = edges[0] if symmetric else edges[2]
        problem = replace(problem, m=sum(edges[0]), k=sum(edges[1]), n=sum(edges[2]))
    blocking = Blocking(*edges, tuple((1,) * x for x in problem.batch), panels, symmetric)
    # Products are so long that one block at a time is freed late.
    cluster = ClusterSpec(rows * columns * layers, 10**9, "cpu", rate=1.0, link=1e9, load=1e9, threads=threads)
    result, streamed = draw(st.sampled_from(RESULTS))
    schedule = Schedule(blocking, Grid(rows, columns, layers), (1, *cuts), lookahead)
    return Plan(
        problem, schedule, cluster, operands=draw(st.sampled_from(RESIDENCES)), result=result, streamed=streamed
    )


@settings(max_examples=number_of(300))
@given(plans())
def test_bytes_and_tasks_are_those_of_every_block_and_step_and_no_worker_ever_holds_more_than_the_peak(
    plan: Plan,
) -> None:
    counted = BruteForce(plan)
    assert plan.bytes_moved == counted.moved
    assert plan.schedule.tasks == counted.tasks
    assert counted.held <= plan.peak.worker


@settings(max_examples=number_of(300))
@given(plans(), st.sampled_from(["cpu", "cuda"]), st.integers(0, 2000), st.none() | st.integers(0, 2000))
def test_the_lower_bound_of_the_bytes_that_are_missing_is_never_above_them(
    plan: Plan, device: Literal["cpu", "cuda"], memory: int, host_memory: int | None
) -> None:
    cluster = replace(plan.cluster, device=device, memory=memory, host_memory=host_memory, prepared=1.5, copied=1.0)
    for result in (plan.result, "host", "reduced") if device == "cuda" else (plan.result,):
        lacking = replace(plan, cluster=cluster, result=result, streamed=plan.streamed or result == "reduced")
        assert lacking.least_shortfall <= lacking.shortfall


@pytest.mark.minutes
@settings(max_examples=number_of(200))
@given(plans(even=True))
def test_the_peak_is_reached_where_all_workers_do_the_same(plan: Plan) -> None:
    if len(plan.waves) == 1:
        assert plan.peak.worker <= 1.25 * BruteForce(plan).held

"""With split k, workers also hold sums that come from other layers of the grid, and plans count them."""

from __future__ import annotations

import pytest

from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import parse
from tests.distmm.scheduler.drawn_products import BLOCK, DTYPE, EDGE

WRITTEN = 2  # blocks: one for each thread


def peak(edges: tuple[int, int, int], text: str, symmetric: bool = False, streamed: bool = False) -> int:
    """Return the blocks that a plan counts."""
    m, k, n = (edge * EDGE for edge in edges)
    problem = Problem(m, k, n, DTYPE, symmetry="symmetric" if symmetric else None)
    spec = ClusterSpec(2, 10**9, "cpu", 1e9, 1e9, threads=2)
    plan = Plan(problem, parse(text, problem), spec, operands=("kept", "kept"), result="workers", streamed=streamed)
    return plan.peak.worker // BLOCK


@pytest.mark.parametrize("edge", [3, 4])
def test_a_worker_may_hold_the_sum_of_another_layer_for_each_of_its_chains(edge: int) -> None:
    own = received = edge * edge
    # The step is done before the layers are added: no operands are left.
    assert peak((edge, 2, edge), "g1x1x2 b8x8x8 p1 w1 l1") == own + received + WRITTEN


def test_two_waves_may_add_their_layers_at_a_time() -> None:
    own, received, operands = 2, 2, 1  # as in a trace of `test_simulated_schedules.py`: seed 2526
    assert peak((2, 2, 2), "g1x1x2 b8x8x8 p1 w2x2 l3", symmetric=True, streamed=True) >= (
        own + received + operands + WRITTEN
    )

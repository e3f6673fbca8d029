"""A plan is even if no worker makes twice its share of the blocks of C: then tasks may be fused."""

from __future__ import annotations

import numpy as np
import pytest

from distmm.planning.blocks import Blocking
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.owners import NOWHERE, Grid, Owners
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import Schedule


def plan_of(blocks: int, owners: Owners | Grid, workers: int) -> Plan:
    """Plan a C that is one column of blocks."""
    blocking = Blocking((8,) * blocks, (8,), (8,))
    cluster = ClusterSpec(workers, 10**9, "cpu", rate=1.0, link=1e9, load=1e9)
    return Plan(Problem(8 * blocks, 8, 8, np.dtype("f8")), Schedule(blocking, owners, lookahead=2), cluster)


@pytest.mark.parametrize(
    ("counts", "even"),
    [
        ((1, 1, 1, 1), True),
        ((1, 0, 0, 0), True),  # the share, rounded up, is one
        ((2, 1, 1, 0), False),
        ((2, 2, 1, 0), True),  # the share of 5/4 is rounded up to two
        ((3, 2, 2, 1), True),
        ((4, 2, 1, 1), False),
        ((8, 0, 0, 0), False),
        ((5, 2, 2), True),
        ((6, 2, 1), False),
        ((7,), True),
    ],
)
def test_no_worker_of_an_even_plan_makes_twice_its_share(counts: tuple[int, ...], even: bool) -> None:
    table = tuple(((rank,),) for rank, count in enumerate(counts) for _ in range(count))
    assert plan_of(len(table), Owners(len(counts), "r", table, NOWHERE), len(counts)).is_even == even


@pytest.mark.parametrize(("blocks", "even"), [(1, True), (2, True), (3, False), (4, True), (8, True)])
def test_a_worker_that_a_grid_leaves_idle_has_a_share_too(blocks: int, even: bool) -> None:
    """Two of three workers make all blocks: the share of a third of three blocks is one, of four two."""
    assert plan_of(blocks, Grid(2, 1), 3).is_even == even

"""What workers hold while they gather small chunks, beside what the plan says, on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import dask.array as da
import numpy as np
import pytest
from distributed import Client, wait

import distmm
from distmm.clusters import view
from tests.distmm.scheduler import lockstep

EDGE = 640


@pytest.fixture(autouse=True)
def current(client: Client) -> Iterator[None]:
    view.ask(client)
    with client.as_current():
        yield


@pytest.mark.minutes
@pytest.mark.parametrize("steps", [2, 8])
def test_no_worker_holds_more_than_the_plan_says(client: Client, steps: int) -> None:
    n, k = 2 * EDGE, steps * EDGE
    A, B = client.persist([da.random.random(shape, chunks=80) for shape in ((n, k), (k, n))])
    wait([A, B])
    plan = distmm.plan(A, B, plan=f"g2x2x1 b{EDGE}x{EDGE}x{EDGE} p1 w1 l2 c80x80x80")
    assert plan.schedule.gathers(plan.problem, "cpu")
    with lockstep.gate(client):
        C = client.persist(distmm.matmul(A, B, plan=plan))
        peak = lockstep.largest_held(client, C, EDGE * EDGE * 8)
    assert 1 <= plan.peak.worker / peak <= 1.75
    np.testing.assert_allclose(C.compute(), A.compute() @ B.compute())

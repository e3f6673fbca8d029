"""Tasks that wait for their step are no concern of Dask's: neither of its alarms nor of its deadlines."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Scheduler, wait

import distmm
from distmm.scheduler import dask_internals
from tests.distmm.scheduler import lockstep
from tests.until import until

EDGE = 16


def integers(seed: int, blocks: int) -> da.Array:
    data = np.random.default_rng(seed).integers(-9, 10, (2 * EDGE, blocks * EDGE)).astype("f4")
    return da.from_array(data, chunks=EDGE, name=f"held-{seed}")


def states(dask_scheduler: Scheduler) -> Counter[str]:
    """What Dask's page counts by state."""
    found: Counter[str] = Counter()
    for prefix in dask_scheduler.task_prefixes.values():
        found.update(prefix.states)
    return found


def holds(dask_scheduler: Scheduler) -> int:
    """Tasks that only distmm keeps from running."""
    return sum(ts.waiting_on == {dask_internals.HELD} for ts in dask_scheduler.tasks.values())


def past_the_deadline(dask_scheduler: Scheduler) -> None:
    """Do what Dask does when `no-workers-timeout` has passed."""
    before, dask_scheduler.no_workers_timeout = dask_scheduler.no_workers_timeout, 1e-9
    try:
        dask_scheduler._check_no_workers()
    finally:
        dask_scheduler.no_workers_timeout = before


@pytest.fixture
def product(client: Client) -> tuple[da.Array, np.ndarray]:
    """A product of eight steps, of which the lookahead opens fewer, and what it is to be."""
    a, b = integers(1, 8), integers(2, 8).T
    C = distmm.matmul(a, b, client=client, blocks=(EDGE, EDGE, EDGE))
    return C, a.compute() @ b.compute()


def test_a_product_with_held_steps_alarms_nobody_and_outlasts_dasks_deadline(
    client: Client, product: tuple[da.Array, np.ndarray]
) -> None:
    C, expected = product
    with lockstep.gate(client):
        result = client.persist(C)
        lockstep.at_rest(client)
        assert client.run_on_scheduler(holds)
        assert not client.run_on_scheduler(states)["no-worker"]
        client.run_on_scheduler(past_the_deadline)
        lockstep.largest_held(client, result, EDGE * EDGE * 4)
    np.testing.assert_array_equal(client.compute(result).result(timeout=120), expected)


@pytest.mark.parametrize("end", ["cancelled", "left by its client"])
def test_a_product_that_is_given_up_leaves_nothing_held(
    client: Client, product: tuple[da.Array, np.ndarray], end: str
) -> None:
    C, _ = product
    with lockstep.gate(client):
        with Client(client.cluster, set_as_default=False) as other:
            result = other.persist(C)
            lockstep.at_rest(client)
            assert client.run_on_scheduler(holds)
            if end == "cancelled":
                other.cancel(result)
                until(lambda: not client.run_on_scheduler(holds))
        until(lambda: not client.run_on_scheduler(holds))
        for _ in range(2):
            lockstep.step(client)  # what workers had begun
    names = {C.name}
    until(
        lambda: (
            not client.run_on_scheduler(
                lambda dask_scheduler: names & {key[0] for key in dask_scheduler.tasks if isinstance(key, tuple)}
            )
        )
    )


def test_what_needs_no_failed_block_is_made(client: Client) -> None:
    def load(block: np.ndarray, block_info: Any = None) -> np.ndarray:
        if block_info[0]["chunk-location"] == (0, 5):
            raise OSError("block (0, 5) cannot be read")
        return block

    with client.as_current():
        A = da.ones((40, 120), chunks=20).map_blocks(load, dtype="f8", meta=np.empty((0, 0))).persist()
        wait(A)
        C = distmm.matmul(A, da.ones((120, 40), chunks=20), plan="g1x2x1 b20x20x20 p1 w1 l1").persist()
        wait(C, timeout=60)
        states = [[client.futures[C.name, i, j].status for j in range(2)] for i in range(2)]
        assert states == [["error"] * 2, ["finished"] * 2]
        np.testing.assert_array_equal(C[20:].compute(), 120)

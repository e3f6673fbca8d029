"""Reduced products whose C does not fit: a chain gives its slot back when it has finished, though its parts stay."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import distmm
from distmm import DoesNotFitError
from distmm.graph.placement import Placement
from distmm.graph.product_graph import ProductLayer
from distmm.planning.plan import Plan
from distmm.scheduler.product_state import Limits, PlannedTask
from distmm.scheduler.products import Products
from tests import forked
from tests.distmm.scheduler import lockstep
from tests.distmm.scheduler.steps import finished
from tests.distmm.scheduler.streamed import left
from tests.until import until

EDGE = 64
TEXT = f"g2x2x1 b{EDGE}x{EDGE}x{EDGE} p1 w4x4 l2"  # 16 waves of one block a worker


def operands(edge: int = EDGE) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(-9, 9, (8 * edge, edge)).astype("f8"), rng.integers(-9, 9, (edge, 8 * edge)).astype("f8")


def plan_of(lazy: da.Array) -> Plan:
    plan: Plan = next(layer.plan for layer in lazy.dask.layers.values() if isinstance(layer, ProductLayer))
    return plan


@pytest.mark.parametrize("is_reduced", [False, True])
def test_a_chain_whose_block_is_reduced_gives_its_slot_back_when_it_has_finished(is_reduced: bool) -> None:
    products = Products()
    products.ranks.join("tcp://0", 0)
    first, second = (Placement("c", (), 0, j, 0, j, owners=(0,)) for j in range(2))
    tasks = [PlannedTask(("c", 0, where.j), where, True, ()) for where in (first, second)]
    limits = Limits(lookahead=2, output_slots=1, reduced=is_reduced)
    products.arrived(tasks, (), {}, (), {"c": limits})
    assert [key for key, _ in products.decide(lambda _: ()).start] == [("c", 0, 0)]
    products.finished(("c", 0, 0), first)
    started = [key for key, _ in products.decide(lambda _: ()).start]
    assert started == ([("c", 0, 1)] if is_reduced else [])
    products.released(("c", 0, 0), first)
    started += [key for key, _ in products.decide(lambda _: ()).start]
    assert started == [("c", 0, 1)]


@pytest.mark.minutes
def test_a_c_of_four_times_the_memory_is_reduced(client: Client, memory: Callable[[int], None]) -> None:
    before = client.run_on_scheduler(left)
    a, b = operands()
    per_worker = a.shape[0] * b.shape[1] * a.itemsize // 4 // 4  # a quarter of C on the four workers together
    memory(per_worker)
    lazy = distmm.topk(a, b, 3, client=client)
    found = plan_of(lazy.values)
    assert len(found.waves) > 1
    assert found.cluster.memory < per_worker  # parts and results need some of it
    assert found.peak.worker <= found.cluster.memory
    with pytest.raises(DoesNotFitError):
        distmm.plan(a, b, client=client, plan=str(found)).validate()
    values, indices = client.compute(list(lazy), sync=True)
    expected = np.argsort(-(a @ b), axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(a @ b, expected, axis=1))
    until(lambda: client.run_on_scheduler(left) <= before)


def test_results_that_do_not_fit_are_refused_with_the_figure(client: Client, memory: Callable[[int], None]) -> None:
    a, b = operands()
    memory(200_000)
    with pytest.raises(DoesNotFitError, match="short by"):
        distmm.topk(a, b, 500, client=client)


@pytest.mark.minutes
def test_no_worker_holds_more_blocks_than_the_plan_says(client: Client) -> None:
    edge = 256
    a, b = np.ones((4 * edge, 2 * edge)), np.ones((2 * edge, 8 * edge))
    text = f"g2x2x1 b{edge}x{edge}x{edge} p1 w1x4 l2"
    sums = distmm.reduce(a, b, "sum", plan=text, client=client)
    p = plan_of(sums)
    assert p.peak.output_slots == 2
    with lockstep.gate(client):
        call = client.compute(sums)
        peak = lockstep.largest_held(client, call, edge * edge * 8)
    np.testing.assert_array_equal(call.result(), (a @ b).sum(axis=1))
    assert peak <= p.peak.worker


def test_parts_that_are_lost_with_a_worker_are_made_again() -> None:
    def slow(block: np.ndarray) -> np.ndarray:
        time.sleep(0.1)
        return block

    a, b = operands()
    A = da.from_array(a, chunks=EDGE).map_blocks(slow, dtype="f8")
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False, "distributed.scheduler.allowed-failures": 100}),
        forked.workers(),
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="2GiB", dashboard_address=":0") as two,
        Client(two, set_as_default=False) as client,
    ):
        lazy = distmm.topk(A, b, 3, plan=f"g2x1x1 b{EDGE}x{EDGE}x{EDGE} p1 w4x2 l2", client=client)
        product = next(name for name, layer in lazy.values.dask.layers.items() if isinstance(layer, ProductLayer))
        call = client.compute(list(lazy))

        until(lambda: finished(client, product)[0] >= 20)  # of 64
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        _, indices = client.gather(call)
    np.testing.assert_array_equal(indices, np.argsort(-(a @ b), axis=1, kind="stable")[:, :3])

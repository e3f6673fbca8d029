"""Placement, bytes and memory on a real cluster of four worker processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.highlevelgraph import HighLevelGraph
from distributed import Client, LocalCluster, Scheduler, futures_of, wait

from distmm import matmul, plan
from distmm.clusters import view
from distmm.errors import InputError
from distmm.graph.consumers import product_of
from distmm.planning.owners import Grid
from distmm.scheduler.plugin import PlacementPlugin
from distmm.worker.tasks.epilogue import Epilogue
from distmm.worker.tasks.kernel_choice import KernelChoice
from tests import forked
from tests.bench.experiment.moved_bytes import moved_bytes
from tests.distmm.graph import serial
from tests.distmm.scheduler import lockstep
from tests.distmm.scheduler.steps import finished
from tests.exact_sums import in_panels, whole_numbers
from tests.tables import later
from tests.until import until

BLOCKS, EDGE = 4, 64
N = BLOCKS * EDGE
BLOCK_BYTES = EDGE * EDGE * 4


@pytest.fixture(autouse=True)
def current(client: Client, blocks_are_chunks: None) -> Iterator[None]:
    with client.as_current():
        yield


def lazy(seed: int) -> da.Array:
    return da.random.default_rng(seed).random((N, N), chunks=EDGE, dtype="f4")


def owners(client: Client, name: str) -> dict[tuple[Any, ...], int]:
    """Rank of the only worker that has a block of C: the one that made it."""

    def read(dask_scheduler: Scheduler) -> dict[tuple[Any, ...], int]:
        ranks = dask_scheduler.plugins[PlacementPlugin.name].ranks
        made = {key: ts for key, ts in dask_scheduler.tasks.items() if isinstance(key, tuple) and key[0] == name}
        return {key: ranks.index(worker.address) for key, ts in made.items() for worker in (ts.who_has or ())}

    return client.run_on_scheduler(read)


class Sink:
    """A target that takes blocks and keeps none."""

    def __setitem__(self, region: object, block: np.ndarray) -> None: ...


USES: dict[str, Callable[[da.Array, Client], Any]] = {
    "persist": lambda C, client: client.persist(C),
    "compute": lambda C, client: client.compute(C),
    "sum": lambda C, client: client.compute(C.sum()),
    "store": lambda C, client: client.compute(da.store(C, Sink(), lock=False, compute=False)),
    "plus one": lambda C, client: client.persist(C + 1),
}


@pytest.mark.parametrize("use", later(USES, first=2))
def test_lazy_products_move_exactly_the_2d_bound_whatever_uses_them(client: Client, use: str) -> None:
    A, B = lazy(1), lazy(2)
    C = matmul(A, B, client=client)
    p = plan(A, B, client=client)
    assert p.grid == Grid(2, 2)
    before = moved_bytes(client)
    result = USES[use](C, client)
    wait(result)
    bound = BLOCKS**2 * (2 + 2 - 2) * BLOCK_BYTES
    small_change = 3000 if use in ("sum", "store") else 0
    if use == "compute":  # gathers nothing between workers, but finalises C on one of them
        small_change = N * N * 4
    assert bound <= moved_bytes(client) - before <= bound + small_change
    assert p.bytes_moved == p.cost.bytes_bound == bound
    del result


def at_home(client: Client, seed: int, rows: int, columns: int, edge: int, grid: Grid) -> da.Array:
    """Random blocks in the workers' memory, block-cyclically."""
    ranks = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins[PlacementPlugin.name].ranks)
    name = f"home-{seed}-{edge}"

    def block(i: int, j: int) -> np.ndarray:
        return np.random.default_rng((seed, i, j)).random((edge, edge))

    futures = {
        (name, i, j): client.submit(block, i, j, key=(name, i, j), workers=[ranks[grid.owner(i, j)]])
        for i in range(rows)
        for j in range(columns)
    }
    wait(list(futures.values()))
    return da.Array(HighLevelGraph.from_collections(name, futures), name, ((edge,) * rows, (edge,) * columns), "f8")


@pytest.mark.parametrize("resident", later([False, True]))
def test_no_worker_holds_more_than_the_plan_says(client: Client, resident: bool) -> None:
    # Products that outlast the scheduler, as the planner makes them: a task of 640^3 takes 15 ms.
    edge, blocks, depth, grid = 640, 4, 4, Grid(2, 2)
    view.ask(client)
    if resident:
        A, B = at_home(client, 3, blocks, depth, edge, grid), at_home(client, 4, depth, blocks, edge, grid)
    else:
        shapes = ((blocks * edge, depth * edge), (depth * edge, blocks * edge))
        A, B = (da.random.default_rng(s).random(shape, chunks=edge) for s, shape in enumerate(shapes))
    text = f"g2x2x1 b{edge}x{edge}x{edge} p1 w1 l2"
    p = plan(A, B, client=client, plan=text if resident else None)
    assert p.operands == (("resident" if resident else "loaded"),) * 2
    assert str(p) == text
    before = moved_bytes(client)
    block, own, panel = edge * edge * 8, blocks**2 // 4, blocks // 2
    with lockstep.gate(client):
        C = client.persist(matmul(A, B, client=client, plan=p))
        peak = lockstep.largest_held(client, C, block)
    # C, the blocks of two steps (half of each panel is copied, half is at home), the block that is being written, and
    # two that are not yet freed.
    assert p.peak.worker == (own + 2 * panel * (1 if resident else 2) + 3) * block
    assert p.peak.worker / 1.25 <= peak <= p.peak.worker
    assert moved_bytes(client) - before == p.bytes_moved == blocks * depth * 2 * block


@pytest.mark.minutes
def test_what_one_wave_of_a_lazy_product_has_loaded_stays_for_the_next(client: Client) -> None:
    edge, blocks, depth = 640, 4, 4
    view.ask(client)
    shapes = ((blocks * edge, depth * edge), (depth * edge, blocks * edge))
    A, B = (da.random.default_rng(s).random(shape, chunks=edge) for s, shape in enumerate(shapes))
    p = plan(A, B, client=client, plan=f"g2x2x1 b{edge}x{edge}x{edge} p1 w2x2 l2")
    assert len(p.waves) == 4
    with lockstep.gate(client):
        C = client.persist(matmul(A, B, client=client, plan=p))
        peak = lockstep.largest_held(client, C, edge * edge * 8)
    # A of one row of waves and all of B, which the plan counts in full, are not there at the same time.
    assert p.peak.worker / 1.4 <= peak <= p.peak.worker


def test_every_block_of_c_is_made_by_its_owner(client: Client) -> None:
    C = matmul(lazy(5), lazy(6), client=client)
    name = C.name
    kept = client.persist(C)
    wait(kept)
    ran = owners(client, name)
    assert len(ran) == BLOCKS**2
    assert all(rank == Grid(2, 2).owner(i, j) for (_, i, j), rank in ran.items())


def test_copies_of_persisted_operands_are_dropped_after_their_last_use(client: Client) -> None:
    A, B = client.persist([lazy(7), lazy(8)])
    wait([A, B])
    C = client.persist(matmul(A, B, client=client))
    wait(C)

    keys = [future.key for array in (A, B) for future in futures_of(array)]

    def copies(dask_scheduler: Scheduler) -> int:
        return max(len(dask_scheduler.tasks[key].who_has) for key in keys)

    until(lambda: client.run_on_scheduler(copies) == 1)


def left(dask_scheduler: Scheduler) -> set[tuple[str, str]]:
    """What the plugin keeps of products: the name of each table, with each of its keys."""
    products = dask_scheduler.plugins[PlacementPlugin.name].products
    tables = vars(products) | vars(products.replicas)
    return {(name, str(key)) for name in tables if name not in ("ranks", "replicas") for key in tables[name]}


@pytest.fixture
def nothing_is_left(client: Client) -> Callable[[], None]:
    """Wait until the plugin keeps nothing of the products of this test."""
    view.ask(client)
    before = client.run_on_scheduler(left)
    return lambda: until(
        lambda: client.run_on_scheduler(left) <= before, lambda: str(client.run_on_scheduler(left) - before)[:1000]
    )


def test_the_plugin_forgets_products_that_are_gone(client: Client, nothing_is_left: Callable[[], None]) -> None:
    C = client.persist(matmul(lazy(9), lazy(10), client=client))
    wait(C)
    done, total = finished(client, product_of(C.name))
    assert done == total > 0
    name, tasks = C.name, plan(lazy(9), lazy(10), client=client).schedule.tasks

    def planned(dask_scheduler: Scheduler) -> int:
        return dask_scheduler.plugins[PlacementPlugin.name].products.products[name].total

    assert client.run_on_scheduler(planned) == tasks
    del C
    nothing_is_left()


@pytest.mark.minutes
def test_products_that_are_computed_again_while_they_are_let_go_are_forgotten_too(
    client: Client, nothing_is_left: Callable[[], None]
) -> None:
    C = matmul(lazy(9), lazy(10), client=client)
    for _ in range(5):
        client.compute(C, sync=True)
    nothing_is_left()


@pytest.mark.bits
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "c8", "f2"])
def test_the_graph_computes_bit_for_bit_what_the_serial_executor_does(client: Client, dtype: str) -> None:
    a, b = in_panels(whole_numbers((3, 130, 90), dtype), 32), whole_numbers((90, 70), dtype, 1)
    A, B = da.from_array(a, chunks=(2, 64, 32)), da.from_array(b, chunks=(32, 48))
    p = plan(A, B, client=client)
    result = np.dtype(dtype)
    expected = serial.execute(p, a, b, KernelChoice("cpu", np.dtype(result)), Epilogue(result, "numpy"))
    C = matmul(A, B, client=client)
    np.testing.assert_array_equal(client.compute(C, sync=True), expected)
    np.testing.assert_array_equal(C.compute(scheduler="synchronous"), expected)
    np.testing.assert_allclose(expected, a @ b, rtol=2e-3, atol=1e-5 * np.abs(expected).max())


def test_serial_executor_applies_the_epilogue() -> None:
    rng = np.random.default_rng(12)
    a, b, c = rng.random((20, 30)), rng.random((30, 10)), rng.random((20, 10))
    p = plan(a, b, blocks=(8, 16, 8))
    out = serial.execute(p, a, b, KernelChoice("cpu", np.dtype("f8")), Epilogue(np.dtype("f8"), "numpy", 2, 3), c)
    np.testing.assert_allclose(out, 2 * (a @ b) + 3 * c)


def test_tasks_are_made_on_the_scheduler_and_not_on_the_client(client: Client) -> None:
    C = matmul(lazy(17), lazy(18), client=client)
    kept = client.persist(C + 1)
    wait(kept)
    assert not C.dask.layers[C.name].is_materialized()


def test_products_of_products_stay_placed(client: Client) -> None:
    A, B = lazy(13), lazy(14)
    C = matmul(matmul(A, B, client=client), A, client=client)
    before = moved_bytes(client)
    kept = client.persist(C)
    wait(kept)
    # Two products, and A is needed at two places in the second one: at most three bounds.
    assert moved_bytes(client) - before <= 3 * BLOCKS**2 * 2 * BLOCK_BYTES
    a, b = client.compute([A, B], sync=True)
    np.testing.assert_allclose(client.compute(kept, sync=True), a @ b @ a, rtol=1e-3)


def test_gpus_are_refused_on_workers_without(client: Client) -> None:
    with pytest.raises(InputError, match=r"4 of 4 workers have none.*not started by dask-cuda"):
        matmul(lazy(1), lazy(2), client=client, device="gpu")


def test_a_cluster_without_workers_is_refused() -> None:
    with (
        LocalCluster(n_workers=0, dashboard_address=":0", processes=False) as empty,
        Client(empty, set_as_default=False) as nobody,
        pytest.raises(InputError, match="no workers"),
    ):
        matmul(np.ones((4, 4)), np.ones((4, 4)), client=nobody)


def test_ranks_of_workers_that_left_are_given_up_before_the_next_product() -> None:
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, processes=False, dashboard_address=":0") as three,
        Client(three, set_as_default=False) as client,
        client.as_current(),
    ):
        view.ask(client)
        first = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins[PlacementPlugin.name].ranks[0])
        client.retire_workers([first])
        C = client.persist(matmul(lazy(19), lazy(20), client=client))
        wait(C)
        ranks = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins[PlacementPlugin.name].ranks)
        assert len(ranks) == 2
        assert first not in ranks


JOINED = threading.Event()


def after_the_join(block: np.ndarray, block_info: Any = None) -> np.ndarray:
    """Let the blocks of the last panel wait."""
    if block_info and block_info[0]["chunk-location"][1] == BLOCKS - 1:
        assert JOINED.wait(120)
    return block


def early_after_the_join(block: np.ndarray, block_info: Any = None) -> np.ndarray:
    """Let the blocks of the second panel wait: the steps of the others are held."""
    assert not block_info or block_info[0]["chunk-location"][1] != 1 or JOINED.wait(120)
    return block


def test_a_worker_that_joins_a_running_product_makes_none_of_its_blocks() -> None:
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as two,
        Client(two, set_as_default=False) as client,
    ):
        A = lazy(31).map_blocks(after_the_join, dtype="f4", meta=np.empty((0, 0), "f4"))
        # A plan for three workers, on two: rank 2 of the plan is the first worker, and stays it.
        p = plan(A, lazy(32), plan=f"g3x1x1 b{EDGE}x{EDGE}x{EDGE} p1 w1 l2")
        C = client.persist(matmul(A, lazy(32), plan=p, client=client))
        until(lambda: finished(client, product_of(C.name))[0] > 0)
        two.scale(3)
        client.wait_for_workers(3)
        JOINED.set()
        wait(C)
        assert (
            len(client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins[PlacementPlugin.name].ranks)) == 3
        )
        made = owners(client, C.name)
    assert {key: p.grid.owner(*key[1:]) % 2 for key in made} == made
    assert len(made) == BLOCKS**2


def test_a_worker_that_joins_an_adaptive_cluster_takes_its_share_of_a_running_product() -> None:
    JOINED.clear()
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as one,
        Client(one, set_as_default=False) as client,
    ):
        A, B = lazy(33), lazy(34)
        waiting = A.map_blocks(early_after_the_join, dtype="f4", meta=np.empty((0, 0), "f4"))
        p = plan(waiting, B, plan=f"g1x1x1 b{EDGE}x{EDGE}x{EDGE} p1 w1 l1")
        C = client.persist(matmul(waiting, B, plan=p, client=client))
        # The first step is done. The second one cannot run: its blocks of A wait.
        until(lambda: finished(client, product_of(C.name))[0] == BLOCKS**2)
        # However little time the tasks take: Dask alone counts no more than the loads of one step.
        asks = one.scheduler.handlers["adaptive_target"]
        assert one.scheduler.adaptive_target(target_duration="1us") <= 2 * BLOCKS
        assert asks(target_duration="1us") == BLOCKS**2
        one.scale(2)
        client.wait_for_workers(2)
        JOINED.set()
        wait(C, timeout=120)
        made = owners(client, C.name)  # before a task reads C, on a worker that then has a copy of each block
        result = client.compute(C).result(timeout=120)
        np.testing.assert_allclose(result, client.compute(A @ B).result(timeout=120), rtol=1e-5)
    assert Counter(made.values()) == {0: BLOCKS**2 // 2, 1: BLOCKS**2 // 2}


@pytest.mark.bits
def test_a_product_survives_a_killed_worker_and_keeps_its_bits() -> None:
    def slow(block: np.ndarray) -> np.ndarray:
        time.sleep(0.1)
        return block

    a, b = in_panels(whole_numbers((N, N), "f4", 15), EDGE), whole_numbers((N, N), "f4", 16)
    A, B = (da.from_array(x, chunks=EDGE).map_blocks(slow, dtype="f4") for x in (a, b))
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False, "distributed.scheduler.allowed-failures": 100}),
        forked.workers(),
        LocalCluster(n_workers=4, threads_per_worker=1, memory_limit="2GiB", dashboard_address=":0") as four,
        Client(four, set_as_default=False) as client,
    ):
        C = matmul(A, B, client=client)
        expected = client.compute(C, sync=True)
        result = client.persist(matmul(A, B, client=client))
        until(lambda: finished(client, product_of(result.name))[0] >= BLOCKS)
        pids = client.run(os.getpid)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        np.testing.assert_array_equal(client.compute(result, sync=True), expected)


def test_a_block_that_cannot_be_made_does_not_keep_the_others_waiting(client: Client) -> None:
    def spoilt(block: np.ndarray, block_info: Any = None) -> np.ndarray:
        if block_info and block_info[0]["chunk-location"] == (0, 0):
            raise ValueError("unreadable")
        return block

    A = lazy(21).map_blocks(spoilt, dtype="f4", meta=np.empty((0, 0), "f4"))
    kept = client.persist(matmul(A, lazy(22), client=client))
    wait(kept, timeout=60)
    states = [future.status for future in futures_of(kept)]
    assert states.count("error") == BLOCKS  # the row of C that needs the block
    assert states.count("finished") == BLOCKS**2 - BLOCKS


def test_what_is_left_of_a_product_is_computed_without_what_is_there(client: Client) -> None:
    C = matmul(lazy(23), lazy(24), client=client)
    part = client.persist(C[: N // 2])
    wait(part)
    whole = client.persist(C)
    wait(whole, timeout=60)
    assert all(future.status == "finished" for future in futures_of(whole))

"""Symmetric products on clusters and GPUs: bytes, memory and bits are those of the plan."""

from __future__ import annotations

import time
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client, Scheduler, Worker, futures_of, wait

import distmm
from distmm.clusters import view
from distmm.planning.owners import Grid
from distmm.scheduler.plugin import PlacementPlugin
from distmm.telemetry import client as telemetry
from distmm.telemetry.scheduler import Telemetry
from distmm.transfer import lending, process_memory
from distmm.worker.tasks.epilogue import Epilogue
from distmm.worker.tasks.kernel_choice import KernelChoice
from tests.bench.experiment.moved_bytes import moved_bytes
from tests.distmm.api.symmetric import mirrored, sample, truth
from tests.distmm.graph import serial
from tests.distmm.scheduler import lockstep
from tests.exact_sums import in_panels, whole_numbers
from tests.tables import later
from tests.until import until

pytestmark = pytest.mark.usefixtures("blocks_are_chunks")

BLOCKS, DEPTH, EDGE = 8, 4, 64


def lazy(seed: int = 1, rows: int = BLOCKS, columns: int = DEPTH, edge: int = EDGE, dtype: str = "f4") -> da.Array:
    return da.random.default_rng(seed).random((rows * edge, columns * edge), chunks=edge, dtype=dtype)


@pytest.fixture
def measured(client: Client) -> Any:
    view.ask(client)
    telemetry.install(client)
    with client.as_current():
        yield client


def finished(client: Client, name: str) -> tuple[int, int]:
    """Product tasks, and blocks of C, that the scheduler saw finish."""

    def read(dask_scheduler: Scheduler) -> tuple[int, int]:
        there = [key for key, ts in dask_scheduler.tasks.items() if ts.state == "memory" and key[0] == name]
        return len(dask_scheduler.plugins[PlacementPlugin.name].products.products[name].done), len(there)

    return client.run_on_scheduler(read)


@pytest.mark.minutes
def test_tasks_and_bytes_are_the_plans_and_less_than_those_of_matmul(measured: Client) -> None:
    moved, tasks, plans = [], [], []
    for plan, product in (
        (distmm.plan(lazy(1)), lambda: distmm.gram(lazy(1), client=measured)),
        (distmm.plan(lazy(2), lazy(2).T), lambda: distmm.matmul(lazy(2), lazy(2).T, client=measured)),
    ):
        assert (plan.grid, plan.blocking.panels) == (Grid(2, 2), 1)
        before = moved_bytes(measured)
        C = product()
        kept = measured.persist(C)
        wait(kept)
        moved.append(moved_bytes(measured) - before)
        products, blocks = finished(measured, C.name)
        assert blocks == BLOCKS**2
        tasks.append(products)
        plans.append(plan)
    assert moved[0] == plans[0].bytes_moved < plans[1].bytes_moved <= moved[1]
    assert tasks == [plan.schedule.tasks for plan in plans] == [BLOCKS * (BLOCKS + 1) // 2 * DEPTH, BLOCKS**2 * DEPTH]


@pytest.mark.minutes
@pytest.mark.parametrize(("dtype", "edge", "slack"), [("f8", 640, 1.25), ("c16", 320, 1.6)])
def test_no_worker_holds_more_than_the_plan_says(measured: Client, dtype: str, edge: int, slack: float) -> None:
    A = da.random.default_rng(5).random((6 * edge, 3 * edge), chunks=edge)
    A = A if dtype == "f8" else A.map_blocks(lambda x: x + 1j, dtype=dtype)
    plan = distmm.plan(A)
    assert (plan.grid, plan.blocking.panels, plan.lookahead) == (Grid(2, 2), 1, 2)
    with lockstep.gate(measured):
        kept = measured.persist(distmm.gram(A, plan=plan, client=measured))
        peak = lockstep.largest_held(measured, kept, edge * edge * np.dtype(dtype).itemsize)
    # Conjugates come while the last blocks of A go: their sum, which the plan allows for, is not reached.
    assert plan.peak.worker / slack <= peak <= plan.peak.worker


def test_images_are_views_beside_their_sources(measured: Client) -> None:
    C = measured.persist(distmm.gram(lazy(6), client=measured))
    wait(C)
    name = C.name

    def views(dask_worker: Worker) -> list[bool]:
        blocks = {key[1:]: block for key, block in dask_worker.data.items() if key[0] == name}
        return [np.shares_memory(block, blocks[j, i]) for (i, j), block in blocks.items() if i < j]

    found = [view for views_there in measured.run(views).values() for view in views_there]
    assert found == [True] * (BLOCKS * (BLOCKS - 1) // 2)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("text", "dtype", "trans"),
    later(
        [
            ("g2x2x1 b2x32x32x32 p2 w1 l2", "f4", False),
            ("g1x2x2 b2x64x32x64 p1 w1 l3", "f2", False),
            ("g1x2x2 b2x64x32x64 p1 w1 l3", "c8", True),
        ]
    ),
)
def test_the_graph_computes_bit_for_bit_what_the_serial_executor_does(
    client: Client, dtype: str, trans: bool, text: str
) -> None:
    a, result = in_panels(whole_numbers((3, 130, 100), dtype), 32, squared=True), np.dtype(dtype)
    a = np.swapaxes(a, 1, 2).copy() if trans else a
    plan = distmm.plan(a, transa=trans, plan=text)
    epilogue = Epilogue(result, "numpy", 3, conjugate=trans)
    expected = serial.execute(plan, np.swapaxes(a, 1, 2) if trans else a, None, KernelChoice("cpu", result), epilogue)
    np.testing.assert_array_equal(expected, mirrored(expected))
    C = distmm.gram(a, alpha=3, trans=trans, plan=text, client=client)
    for _ in range(2):  # what comes over the network comes with any alignment
        np.testing.assert_array_equal(client.compute(C, sync=True), expected)
    np.testing.assert_array_equal(C.compute(scheduler="threads"), expected)
    np.testing.assert_allclose(expected, 3 * truth(a, trans), rtol=2e-3, atol=1e-5 * np.abs(expected).max())


@pytest.mark.bits
@pytest.mark.parametrize(("waves", "dtype"), later([("w1", "f4"), ("w2", "f4"), ("w100", "c8")]))
def test_waves_fill_both_triangles(client: Client, waves: str, dtype: str, tmp_path: Any) -> None:
    a = in_panels(whole_numbers((2, 400, 40), dtype), 20, squared=True)
    text = f"g2x2x1 b2x80x20x80 p1 {waves} l2"
    plan = distmm.plan(a, plan=text, client=client)
    assert len(plan.waves) == {"w1": 1, "w2": 3, "w100": 6}[waves]
    expected = distmm.gram(a, plan=text).compute(scheduler="synchronous")
    np.testing.assert_allclose(expected, truth(a), rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    array = np.zeros((2, 400, 400), dtype)
    store = zarr.create_array(tmp_path / "c.zarr", shape=array.shape, chunks=(1, 80, 80), dtype=dtype)
    for out in (array, store):
        assert distmm.gram(a, plan=text, out=out, client=client) is out
        np.testing.assert_array_equal(out[:], expected)


def test_waves_come_to_a_client_that_workers_do_not_reach(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "allow", lambda: False)
    monkeypatch.delitem(lending._tried, client, raising=False)
    a, out = sample((500, 200)), np.zeros((500, 500))
    distmm.gram(a, plan="g2x2x1 b128x100x128 p1 w2 l2", out=out, client=client)
    np.testing.assert_allclose(out, truth(a), atol=1e-9)


def test_without_a_cluster_this_process_writes() -> None:
    a, out = sample((30, 20)), np.zeros((20, 20))
    distmm.gram(a, trans=True, out=out, blocks=(8, 8))
    np.testing.assert_allclose(out, truth(a, trans=True))


@pytest.mark.minutes
def test_telemetry_knows_the_blocks_that_are_not_multiplied(client: Client) -> None:
    def newest(dask_scheduler: Scheduler) -> Any:
        *_, record = dask_scheduler.plugins[Telemetry.name].records.values()
        return record.figures(time.time())

    plan = distmm.plan(lazy(7), plan="g2x2x1 b64x64x64 p1 w2 l2", client=client)
    client.gather(futures_of(client.persist(distmm.gram(lazy(7), plan=plan, client=client))))
    for _ in range(2):
        figures = client.run_on_scheduler(newest)
        assert (figures.blocks_done, figures.blocks, figures.state) == (BLOCKS**2, BLOCKS**2, "complete")
        assert figures.done == figures.total == plan.schedule.tasks
        distmm.gram(lazy(10), plan=plan, client=client, out=np.zeros((BLOCKS * EDGE,) * 2, "f4"))


@pytest.mark.minutes
@pytest.mark.bits
def test_a_lost_worker_costs_time_and_no_bits(client: Client) -> None:
    a = in_panels(whole_numbers((BLOCKS * EDGE, DEPTH * EDGE), "f4", 8), EDGE, squared=True)
    A = da.from_array(a, chunks=EDGE)
    C = distmm.gram(A, client=client)
    expected = client.compute(C, sync=True)
    kept = client.persist(distmm.gram(A, client=client))
    client.gather(client.compute(kept.sum()))
    name = kept.name

    def drop(dask_scheduler: Scheduler) -> int:
        """Let the scheduler believe that rank 2 has lost its blocks of C, as when its process dies."""
        plugin = dask_scheduler.plugins[PlacementPlugin.name]
        worker = dask_scheduler.workers[plugin.ranks[2]]
        lost = [ts.key for ts in list(worker.has_what) if ts.key[0] == name]
        for key in lost:
            dask_scheduler.remove_all_replicas(dask_scheduler.tasks[key])
            dask_scheduler.transitions({key: "released"}, "test")
        return len(lost)

    assert client.run_on_scheduler(drop) > 0
    until(lambda: all(future.status == "finished" for future in futures_of(kept)), "the blocks do not come back")
    np.testing.assert_array_equal(client.compute(kept, sync=True), expected)


@pytest.mark.minutes
def test_verify_takes_it_as_it_takes_any_product(client: Client) -> None:
    A = lazy(9)
    with client.as_current():
        C = distmm.gram(A, client=client)
        assert distmm.verify(A, A.T, C).ok
        assert not distmm.verify(A, A.T, C + (da.arange(C.shape[0], chunks=EDGE) == 300)).ok


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i4", "c8"])
@pytest.mark.parametrize("kernel", [None, "tiled"])
def test_gpus_make_symmetric_products(dtype: str, kernel: str | None) -> None:
    import cupy

    a = sample((900, 640), dtype)
    if dtype == "f2":
        a = a / np.float16(16)  # so that the sums of squares stay below float16's largest number
    for trans, blocks in ((False, (256, 320)), (True, (320, 256))):
        A = da.from_array(cupy.asarray(a), chunks=(256, 320), asarray=False)
        C = distmm.gram(A, trans=trans, kernel=kernel).compute(scheduler="synchronous")
        assert isinstance(C, cupy.ndarray)
        c = C.get()
        np.testing.assert_array_equal(c, mirrored(c))
        turned = a.conj().T
        assert distmm.verify(*((turned, a) if trans else (a, turned)), c, check="full").ok
        host = distmm.gram(a, trans=trans, kernel=kernel, device="gpu", blocks=blocks)
        np.testing.assert_array_equal(host.compute(scheduler="synchronous"), c)

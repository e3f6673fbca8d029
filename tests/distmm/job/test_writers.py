"""Blocks are written beside products, and what they leave behind does not grow with their number."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, Worker, WorkerPlugin
from distributed.metrics import context_meter

from distmm import job
from distmm.all_workers import workers_of
from distmm.job import writer
from distmm.storage import open_matrix
from distmm.storage.zarr_target import ZarrTarget
from distmm.worker.worker_slots import slot_released
from tests.until import until


class HungDisk(WorkerPlugin):
    """Keeps what is written from reaching the disk, and lets two blocks be written beside products."""

    name = "hung-disk"

    def setup(self, worker: Worker) -> None:
        self.waiting, self.mended = 0, threading.Event()
        self.sync, self.writers = ZarrTarget.sync, writer.WRITERS
        plugin = self

        def sync(target: ZarrTarget, *region: slice) -> None:
            plugin.waiting += 1
            plugin.mended.wait()
            plugin.sync(target, *region)

        ZarrTarget.sync, writer.WRITERS = sync, 2  # type: ignore[method-assign]

    def teardown(self, worker: Worker) -> None:
        ZarrTarget.sync, writer.WRITERS = self.sync, self.writers  # type: ignore[method-assign]
        self.mended.set()


def writing(dask_worker: Worker) -> tuple[int, int]:
    """Blocks that wait for the disk, and tasks that have a slot."""
    return dask_worker.plugins[HungDisk.name].waiting, len(dask_worker.state.executing)


def mend(dask_worker: Worker) -> None:
    dask_worker.plugins[HungDisk.name].mended.set()


def test_a_disk_that_hangs_makes_products_wait(client: Client, tmp_path: Path) -> None:
    a, b = np.random.default_rng(0).integers(-9, 10, (2, 120, 60)).astype("f8")
    plan = "g1x4x1 b30x60x30 p1 w1 l1"  # each of the four workers, of one thread, has four blocks
    client.register_plugin(HungDisk())
    try:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(job.multiply, a, b.T, tmp_path / "C.zarr", client=client, plan=plan)
            try:
                until(lambda: done.done() or set(client.run(writing).values()) == {(3, 1)})
                assert not done.done()
            finally:
                client.run(mend)
            done.result()
    finally:
        client.unregister_worker_plugin(HungDisk.name)
    np.testing.assert_array_equal(open_matrix(tmp_path / "C.zarr")[...], a @ b.T)


def test_tasks_that_leave_their_slot_leave_no_callbacks_to_those_after_them(client: Client) -> None:
    def leave(_: int) -> int:
        with slot_released("store"):
            return len(context_meter._callbacks.get())

    worker, *_ = workers_of(client)
    callbacks: list[Any] = client.gather(client.map(leave, range(60), workers=worker, pure=False))
    assert max(callbacks) < 10  # a task has four of its own

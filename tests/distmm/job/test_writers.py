"""Blocks are written beside products, small ones as one. What they leave behind does not grow with their number."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster, Worker, WorkerPlugin
from distributed.metrics import context_meter

import distmm
from distmm import job
from distmm.all_workers import workers_of
from distmm.checking.checksum import checksum
from distmm.job import writer
from distmm.job.contents import Contents
from distmm.job.folder import Folder
from distmm.job.judge import Judge
from distmm.job.lock import locked
from distmm.storage import open_matrix
from distmm.storage.zarr_target import ZarrTarget
from distmm.transfer.counted_writes import CountedRun
from distmm.worker.worker_slots import slot_released
from tests.distmm.job.powerless import Disk
from tests.until import until


class HungDisk(WorkerPlugin):
    """Keeps what is written from reaching the disk, and lets two blocks be written beside products."""

    name = "hung-disk"

    def setup(self, worker: Worker) -> None:
        self.waiting, self.mended = 0, threading.Event()
        self.sync, self.writers = ZarrTarget.sync, writer.WRITERS
        plugin = self

        def sync(target: ZarrTarget, rows: slice, cols: slice) -> None:
            plugin.waiting += 1
            plugin.mended.wait()
            plugin.sync(target, rows, cols)

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


def test_a_block_of_several_files_counts_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(writer, "slot_released", lambda kind, most: asked.append(most) or nullcontext())
    plan = distmm.plan(np.ones((4, 4)), np.ones((4, 4)), blocks=(1, 4, 1))
    one: Any = SimpleNamespace(judge=SimpleNamespace(plan=plan))
    for files in (1, 8, 100):
        with writer._beside_products(one, files):
            pass
    assert asked == [32, 4, 1]


def test_tasks_that_leave_their_slot_leave_no_callbacks_to_those_after_them(client: Client) -> None:
    def leave(_: int) -> int:
        with slot_released("store"):
            return len(context_meter._callbacks.get())

    worker, *_ = workers_of(client)
    callbacks: list[Any] = client.gather(client.map(leave, range(60), workers=worker, pure=False))
    assert max(callbacks) < 10  # a task has four of its own


@pytest.mark.parametrize("out", ["C.zarr", "C.npy"])
def test_small_blocks_share_their_syncs(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = np.random.default_rng(0).integers(-9, 10, (2, 24, 24)).astype("f8")
    calls: Counter[str] = Counter()
    for name in ("fsync", "listdir"):
        call = getattr(os, name)

        def counted(*arguments: Any, name: str = name, call: Any = call) -> Any:
            # Dask lists the open files of this process.
            calls[name] += name == "fsync" or str(tmp_path) in str(arguments)
            return call(*arguments)

        monkeypatch.setattr(os, name, counted)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as here,
    ):
        made = job.multiply(a, b, tmp_path / out, client=here, blocks=(2, 24, 2))
    # 144 chunks of C, 9 in a block of the job. A chunk has one sync.
    assert made.plan is not None
    assert made.plan.block_shape == (2, 24, 18)
    most = 1.9 if out == "C.zarr" else 0.9
    assert calls["fsync"] < most * 144
    assert calls["listdir"] < 144
    if out == "C.zarr":
        assert open_matrix(tmp_path / out).chunks == (2, 2)
    np.testing.assert_array_equal(open_matrix(tmp_path / out)[...], a @ b)


@pytest.mark.parametrize("out", ["C.zarr", "C.npy"])
def test_no_marker_of_a_block_of_several_chunks_survives_a_loss_of_power_without_its_block(
    out: str, tmp_path: Path
) -> None:
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    path = disk.root / out
    contents = Contents(None, np.dtype("f8"), (4, 6))
    blocks = {(i, 0): 6.0 * i + 1 + np.arange(12.0).reshape(2, 6) for i in range(2)}
    with locked(f"{path}.job") as lock:
        folder = Folder.of(path).owned(lock.token).of_job("0" * 16)
        folder.make()
        target = contents.create(str(path), folder, (2, 2, 6), False, (2, 2, 2))
        unused: Any = None
        judge = Judge(folder.id, contents, unused, None, 0, 1, 0, {})
        one = writer.Writer(folder, CountedRun(lock.token), target, judge)
        records: Any = {
            (i, j): {"job": folder.id, "i": i, "j": j, "crc32c": checksum(block), "inputs": {"A": "", "B": ""}}
            for (i, j), block in blocks.items()
        }
        with disk.noted():
            found = [one._written(at, {"C": block}, records[at]) for at, block in blocks.items()]
        assert all(record["written"] for record in found)
    marked = 0
    for name, state in disk.states:
        disk.become(state)
        written = target.written()
        for marker in Path(folder.done).glob("*.json"):
            text = marker.read_text()
            if text.strip("\0"):  # else the name came before the content: it is no marker
                assert written.check(json.loads(text)) is None, name
                marked += 1
    assert marked >= len(blocks)

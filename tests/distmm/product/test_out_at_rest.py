"""When a call has ended, by Ctrl-C or by an error, nothing writes into its array any more."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from dask.base import tokenize
from distributed import Client, Worker, WorkerPlugin

import distmm
from distmm.transfer import client_array, counted_writes, process_memory, write_lease
from tests.until import until

SHAPE = (512, 512)
PLAN = "g2x2x1 b256x512x256 p1 w1 l2"  # a block a worker: none waits behind another


class Slow:
    """A file whose first block is written when a gate is there; the others too, or they fail when it has begun."""

    chunks = (1, 1)
    dtype = np.dtype("f8")

    def __init__(self, folder: Path, fails: bool = False) -> None:
        self.folder, self.fails, self.shape = folder, fails, SHAPE
        np.memmap(folder / "c", self.dtype, "w+", shape=SHAPE)

    def __setitem__(self, index: tuple[slice, ...], block: np.ndarray) -> None:
        if self.fails and (index[0].start, index[1].start) != (0, 0):
            until((self.folder / "begun").exists)
            raise OSError("the disk is full")
        (self.folder / "begun").touch()
        until((self.folder / "gate").exists)
        self.values[index] = block

    @property
    def values(self) -> np.ndarray:
        return np.memmap(self.folder / "c", self.dtype, "r+", shape=SHAPE)


class SlowMemory(WorkerPlugin):
    """Has workers write into the client's memory when a gate is there."""

    name = "slow-memory"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, worker: Worker) -> None:
        self.write, process_memory.write = process_memory.write, self.wait_and_write

    def wait_and_write(self, *args: Any) -> None:
        (self.folder / "begun").touch()
        until((self.folder / "gate").exists)
        self.write(*args)

    def teardown(self, worker: Worker) -> None:
        process_memory.write = self.write


@contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt: shells have their background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


class Beside:
    """What happens beside a call: it is interrupted when a write has begun, which ends when the call waits for it.

    Or when the call has ended without waiting, as it must not.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, interrupts: bool) -> None:
        self.folder, self.interrupts = folder, interrupts
        self.waits, self.over = threading.Event(), threading.Event()
        for kind in (counted_writes.CountedRun, write_lease.Lease):
            monkeypatch.setattr(kind, "end", self.noting(kind.end))

    def noting(self, end: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any) -> None:
            self.waits.set()
            end(*args)

        return noted

    def run(self) -> None:
        until((self.folder / "begun").exists)
        if self.interrupts:
            interrupt()
        until(lambda: self.waits.is_set() or self.over.is_set())
        if not self.over.is_set():
            (self.folder / "gate").touch()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()


def at_rest(client: Client | None, folder: Path) -> None:
    """Let what may still write do so, and wait for it."""
    (folder / "gate").touch()

    def running(dask_worker: Worker) -> int:
        return len(dask_worker.state.executing) + len(dask_worker.state.long_running)

    if client is not None:
        until(lambda: not any(client.run(running).values()))
    until(lambda: not counted_writes._running)


def operands() -> tuple[np.ndarray, np.ndarray]:
    return np.ones(SHAPE), np.ones(SHAPE)


@pytest.mark.parametrize("fails", [False, True], ids=["interrupt", "error"])
@pytest.mark.parametrize("where", ["cluster", "threads"])
def test_nothing_is_written_into_a_file_after_the_call(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, fails: bool
) -> None:
    beside, out = Beside(tmp_path, monkeypatch, interrupts=not fails), Slow(tmp_path, fails)
    cluster = client if where == "cluster" else None
    with interruptible(), beside.going_on(), dask.config.set(scheduler="threads", num_workers=4):
        with pytest.raises(OSError if fails else KeyboardInterrupt):
            distmm.matmul(*operands(), out=out, plan=PLAN, client=cluster)
        beside.over.set()
        out.values[:] = -1
    at_rest(cluster, tmp_path)
    np.testing.assert_array_equal(out.values, -1)


def test_nothing_is_written_into_memory_after_the_call(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, out = Beside(tmp_path, monkeypatch, interrupts=True), np.zeros(SHAPE)
    client.register_plugin(SlowMemory(tmp_path))
    try:
        with interruptible(), beside.going_on():
            with pytest.raises(KeyboardInterrupt):
                distmm.matmul(*operands(), out=out, plan=PLAN, client=client)
            beside.over.set()
            out[:] = -1
        at_rest(client, tmp_path)
    finally:
        client.unregister_worker_plugin(SlowMemory.name)
    np.testing.assert_array_equal(out, -1)


def test_who_does_not_wait_is_told_what_still_writes(client: Client, tmp_path: Path) -> None:
    out = Slow(tmp_path)

    def twice() -> None:
        until((tmp_path / "begun").exists)
        interrupt()
        until(lambda: all(client.run(lambda: len(counted_writes._ended)).values()))
        interrupt()

    client.run(lambda: counted_writes._ended.clear())
    thread = threading.Thread(target=twice)
    with interruptible():
        thread.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            distmm.matmul(*operands(), out=out, plan=PLAN, client=client)
        thread.join()
    assert any("may still write the blocks that are begun" in note for note in caught.value.__notes__)
    at_rest(client, tmp_path)


def test_a_task_that_comes_late_writes_nothing() -> None:
    array = np.zeros(SHAPE)
    target = counted_writes.CountedTarget(array)
    target[0:2, 0:2] = 1
    target.run.end(None)
    with pytest.raises(RuntimeError, match="the call has ended"):
        target[2:4, 2:4] = 1
    assert array.sum() == 4
    assert not counted_writes._running


# Memory, and workers that nobody can ask


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """Another process of this user."""
    process_memory.allow()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def write(array: client_array.ClientArray) -> str:
    try:
        array[0:4, 0:4] = np.ones((4, 4))
    except OSError as error:
        return str(error)
    return "written"


def hold(given: write_lease.Lease, begun: Path, gate: Path) -> None:
    with given.writing():
        begun.touch()
        until(gate.exists)


def hold_until_killed(given: write_lease.Lease, begun: Path) -> None:
    with given.writing():
        begun.touch()
        signal.pause()


def leased(array: np.ndarray) -> client_array.ClientArray:
    return replace(client_array.ClientArray.of(array), lease=write_lease.Lease.begin())


def test_another_process_writes_as_long_as_the_lease_lasts(worker: Any) -> None:
    array = np.zeros((4, 4))
    target = leased(array)
    assert target.lease is not None
    assert worker.apply(write, (target,)) == "written"
    array[:] = 0
    target.lease.end()
    assert "has ended: nothing more is written" in worker.apply(write, (target,))
    assert "has ended: nothing more is written" in write(target)
    with open(os.devnull) as other:  # a file that has its number by now
        reused = replace(target, lease=replace(target.lease, fd=other.fileno()))
        assert "has ended: nothing more is written" in worker.apply(write, (reused,))
    assert not array.any()


def test_each_call_has_tasks_of_its_own() -> None:
    array, other = np.zeros((2, 4, 4))
    targets = [leased(array), leased(other), counted_writes.CountedTarget(array), counted_writes.CountedTarget(array)]
    assert len({tokenize(target) for target in targets}) == 4
    for target in targets[:2]:
        assert isinstance(target, client_array.ClientArray)
        assert target.lease is not None
        target.lease.end()


def test_the_end_of_a_lease_waits_for_who_is_writing(worker: Any, tmp_path: Path) -> None:
    given = write_lease.Lease.begin()
    held = worker.apply_async(hold, (given, tmp_path / "begun", tmp_path / "gate"))
    until((tmp_path / "begun").exists)
    end = threading.Thread(target=given.end)
    end.start()
    until(lambda: os.fstat(given.fd).st_size == 0)
    assert end.is_alive()
    (tmp_path / "gate").touch()
    end.join()
    held.get()


def test_the_end_of_a_lease_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    given = write_lease.Lease.begin()
    process = multiprocessing.get_context("spawn").Process(target=hold_until_killed, args=(given, tmp_path / "begun"))
    process.start()
    until((tmp_path / "begun").exists)
    process.kill()
    given.end()
    process.join()

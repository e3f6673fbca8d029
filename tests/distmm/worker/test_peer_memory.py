"""Workers unmap the GPU memory of workers that have died."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, Worker, WorkerPlugin

from distmm import pid
from distmm.all_workers import workers_of
from distmm.worker import peer_memory
from distmm.worker.peer_memory import LOOKS, Peers
from tests.until import until


class Driver:
    """Stands for the CUDA driver: counts how often each pool is open in this process."""

    CUDARuntimeError = RuntimeError

    def __init__(self) -> None:
        self.open: Counter[int] = Counter()
        self.waited: list[int] = []  # threads that called deviceSynchronize
        self.idle = threading.Event()  # set while the device is idle
        self.idle.set()

    def ipcOpenMemHandle(self, pool: bytes, flags: int) -> int:  # noqa: N802
        if pool == b"unreachable":
            raise RuntimeError("peer access is not supported")
        self.open[int(pool)] += 1
        return int(pool)

    def ipcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        if not self.open[address]:
            raise RuntimeError("invalid argument")
        self.open[address] -= 1

    def deviceSynchronize(self) -> None:  # noqa: N802
        assert self.idle.wait(120)
        self.waited.append(threading.get_ident())

    def getDevice(self) -> int:  # noqa: N802
        return 3

    def setDevice(self, number: int) -> None:  # noqa: N802
        assert number == 3


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=driver)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(runtime=driver))
    return driver


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def of(process: subprocess.Popen[bytes], pool: bytes = b"7", **card: Any) -> dict[str, Any]:
    return {"machine": pid.machine(), "pid": process.pid, "pool": pool} | card


@pytest.mark.parametrize("by_ucx", [1, 0])
def test_the_pool_of_a_killed_worker_is_closed_for_ucx_too(
    driver: Driver, process: subprocess.Popen[bytes], by_ucx: int
) -> None:
    mine = Peers(None, b"1")
    mine.open(**of(process))
    mine.open(**of(process))  # two workers introduce themselves to each other, so one may hear of the other twice
    for _ in range(by_ucx):
        driver.ipcOpenMemHandle(b"7", 1)
    for _ in range(2 * LOOKS):
        mine.close_dead()
    assert driver.open[7] == 1 + by_ucx
    process.kill()  # it stays a zombie until somebody waits for it
    until(lambda: pid.start_time(process.pid) is None, "the process is still there")
    driver.idle.clear()
    for look in range(LOOKS):
        assert driver.open[7] == 1 + by_ucx, look
        mine.close_dead()
    assert driver.open[7] == 1 + by_ucx  # the device is busy, and the event loop does not wait for it
    driver.idle.set()
    until(lambda: driver.open[7] == 0)
    (thread,) = driver.waited
    assert thread != threading.get_ident()
    mine.close_dead()
    assert (mine.addresses, mine.missing) == ({}, {})


def test_pools_of_other_hosts_and_ones_own_are_left_alone(driver: Driver, process: subprocess.Popen[bytes]) -> None:
    mine = Peers(None, b"1")
    mine.open(**mine.identity)
    mine.open(**of(process, machine="another"))
    mine.open(**of(process, pool=b"unreachable"))
    assert (mine.addresses, driver.open) == ({}, {})


@pytest.mark.parametrize("shared", [True, False])
def test_without_ipc_there_is_no_handle(driver: Driver, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    def get(address: int) -> bytes:
        if not shared:
            raise RuntimeError("operation not supported")
        return b"%d" % address

    driver.ipcGetMemHandle = get
    monkeypatch.setitem(
        sys.modules, "rmm", types.SimpleNamespace(DeviceBuffer=lambda size: types.SimpleNamespace(ptr=7))
    )
    assert peer_memory.pool_handle() == (b"7" if shared else None)


class Meeting(WorkerPlugin):
    """Lets workers introduce themselves to each other, and only note whom they meet."""

    name = "meeting"

    def setup(self, worker: Worker) -> None:
        class Noting(Peers):
            def open(self, **card: Any) -> None:
                self.addresses[card["pid"]] = card["pool"]

        self.peers = Noting(worker, worker.name.to_bytes())
        self.introduction = asyncio.create_task(self.peers.introduce(self.name))


def met(dask_worker: Worker) -> dict[int, bytes]:
    return dict(dask_worker.plugins["meeting"].peers.addresses)


@pytest.mark.minutes
def test_each_worker_meets_all_others_whoever_comes_first() -> None:
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
        client.register_plugin(Meeting())
        client.cluster.scale(3)
        client.wait_for_workers(3)
        cards = {info["name"].to_bytes() for info in workers_of(client).values()}
        assert len(cards) == 3
        until(
            lambda: all(set(found.values()) == cards for found in client.run(met).values()),
            "some have not met all others",
        )

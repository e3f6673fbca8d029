"""The processes of `jobs_network.py`: a scheduler, two workers and clients, each on a host of a faulty network."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from faulty_network import Network, enter
from jobs_kills import BLOCKS, SPAWN, STOPPED, quiet

__all__ = ["DEADLINE", "REFUSED", "STOPPED", "Site", "run_client"]

DEADLINE = 600.0  # seconds of a round
REFUSED = 2

# By default 30 s, 30 s and 5 minutes: a fault has to last for that long before anything is given up. Dask takes no less
# than 11 s for TCP.
TIMEOUTS = {
    "distributed.comm.timeouts.connect": "5s",
    "distributed.comm.timeouts.tcp": "11s",
    "distributed.scheduler.worker-ttl": "8s",
    "distributed.scheduler.allowed-failures": 100,
    "distributed.scheduler.work-stealing": False,
}
STALE_SECONDS, BEAT_SECONDS = 3.0, 0.3  # of locks; by default a minute, and 10 s

PLAN = f"g1x2x1 b{'x'.join(map(str, BLOCKS))} p1 w5x1 l1"  # a wave is a row of blocks


def begin(namespace: str) -> None:
    """Make this process one of a host."""
    import dask

    enter(namespace)
    dask.config.set(TIMEOUTS)
    quiet()
    logging.disable()


def run_scheduler(namespace: str, address: str, file: str) -> None:
    from distributed import Scheduler

    begin(namespace)

    async def serve() -> None:
        async with Scheduler(host=address, port=0, dashboard=False, scheduler_file=file) as scheduler:
            await scheduler.finished()

    asyncio.run(serve())


def run_worker(namespace: str, address: str, file: str, name: str) -> None:
    from distributed import Worker

    begin(namespace)
    _slow_down()

    async def serve() -> None:
        async with Worker(scheduler_file=file, host=address, name=name, nthreads=1, dashboard=False) as worker:
            await worker.finished()

    try:
        asyncio.run(serve())
    finally:
        os._exit(0)  # threads of tasks may wait for what never comes


def _slow_down() -> None:
    """Let each block take some time to be written, so that faults meet a job at work."""
    from distmm.storage.flat import FlatTarget
    from distmm.storage.zarr_target import ZarrTarget
    from distmm.transfer.counted_writes import CountedTarget

    def slow(do: Callable[..., None]) -> Callable[..., None]:
        def slowly(*arguments: object) -> None:
            time.sleep(random.uniform(0.5, 2.5))
            do(*arguments)

        return slowly

    for kind, name in ((FlatTarget, "sync"), (ZarrTarget, "sync"), (CountedTarget, "__setitem__")):
        setattr(kind, name, slow(getattr(kind, name)))


def run_client(namespace: str, address: str, file: str, folder: str, out: str, how: str) -> None:
    """Do what is asked for, and end with the exit code of `distmm multiply`."""
    from distributed import Client

    from distmm import job
    from distmm.errors import InputError, Stopped
    from distmm.job import lock

    begin(namespace)
    lock.machine = lambda: namespace  # type: ignore[attr-defined]
    lock.STALE_SECONDS, lock.BEAT_SECONDS = STALE_SECONDS, BEAT_SECONDS
    said = Path(folder, f"said-{os.getpid()}.txt")
    path, a, b = Path(folder, out), f"{folder}/A.npy", f"{folder}/B.zarr"
    try:
        client = Client(scheduler_file=file, timeout=10)
        client.wait_for_workers(2, timeout=20)
    except Exception:  # the network does not let it in: whatever it says, there is no job yet
        os._exit(STOPPED)
    try:
        while True:
            try:
                if how == "out":
                    _product(client, a, b, path)
                elif how == "resume" and Path(f"{path}.job/manifest.json").exists():
                    job.resume(path, client=client)
                else:
                    job.multiply(a, b, path, client=client, plan=PLAN, seed=1, overwrite=how == "overwrite")
                os._exit(0)
            except InputError as error:
                if "another job works on this output" not in str(error):
                    raise
            time.sleep(0.2)
    except Stopped as error:
        said.write_text(f"75 {error}")
        os._exit(STOPPED)
    except InputError as error:
        said.write_text(f"2 {error}")
        os._exit(REFUSED)
    except Exception:
        said.write_text(traceback.format_exc())
        os._exit(STOPPED if how == "out" else 1)


def _product(client: object, a: str, b: str, path: Path) -> None:
    import numpy as np
    import zarr

    import distmm

    A, B = np.load(a, mmap_mode="r"), zarr.open_array(b, mode="r")
    out = zarr.create_array(path, shape=(A.shape[0], B.shape[1]), chunks=BLOCKS[::2], dtype="f4", overwrite=True)
    distmm.matmul(A, B, out=out, client=client, plan=PLAN)


@dataclass
class Site:
    """The processes; scheduler and workers go on from round to round."""

    network: Network
    folder: Path
    out: str = ""
    how: str = "multiply"
    running: dict[str, BaseProcess] = field(default_factory=dict)
    files: int = 0

    def start(self) -> None:
        """Start what is not running; without its scheduler nothing else is of use."""
        if not self.alive("scheduler"):
            self.stop(*self.running)
            self.files += 1
            self.launch("scheduler", run_scheduler)
            waits = time.monotonic() + DEADLINE
            while not os.path.exists(self.file) and time.monotonic() < waits:
                time.sleep(0.02)
        for name in ("worker-0", "worker-1"):
            if not self.alive(name):
                self.launch(name, run_worker, name)
        if not self.alive("client"):
            self.launch("client", run_client, str(self.folder), self.out, self.how)

    @property
    def file(self) -> str:
        return str(self.folder / f"scheduler-{self.files}.json")

    def alive(self, name: str) -> bool:
        return name in self.running and self.running[name].is_alive()

    def launch(self, name: str, target: Callable[..., None], *arguments: str) -> BaseProcess:
        network = self.network
        where = network.namespaces[name], network.addresses[name], self.file
        process = SPAWN.Process(target=target, args=(*where, *arguments), name=name, daemon=True)
        process.start()
        self.running[name] = process
        return process

    def signal(self, name: str, number: int) -> None:
        if self.alive(name):
            os.kill(self.running[name].pid or 0, number)

    def stop(self, *names: str) -> None:
        """SIGKILL, all before any is waited for."""
        there = [self.running.pop(name) for name in names if name in self.running]
        for process in there:
            process.kill()
        for process in there:
            process.join()

    def said(self, process: BaseProcess) -> str:
        """Return what a client has said at its end."""
        path = self.folder / f"said-{process.pid}.txt"
        return path.read_text() if path.exists() else ""

"""Processes that stop themselves (SIGSTOP) in the middle of a job: between two of their changes, and no later.

Each counts as one of another machine, whose lock is stale when nobody has touched it for a while. So it can be
overtaken while it sleeps, and be woken up afterwards.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from tests.distmm.job.disturbed import multiply
from tests.until import until

REFUSED, STOPPED = 3, 75
SAID = "said.txt"

# What changes a disk.
CHANGES = ("rename", "replace", "link", "mkdir", "unlink", "fsync")


ONE = threading.Lock()


@dataclass
class Moment:
    """The `n`-th change whose words, name of the function and paths, a pattern is found in; stops this process there.

    Attributes
    ----------
    after : bool
        Stop after the change, not before it.
    """

    pattern: str
    n: int = 1
    after: bool = False

    def install(self) -> None:
        """Have this process stop itself there."""
        from distmm.storage import flat, output, zarr_target

        for name in CHANGES:
            setattr(os, name, self._watched(name, getattr(os, name)))
        for module, name in ((flat, "write_rows"), (zarr_target, "write_rows"), (output, "exchange")):
            setattr(module, name, self._watched(name, getattr(module, name)))

    def _watched(self, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            words = [name, *(str(getattr(one, "name", one)) for one in arguments[:2])]
            if name == "fsync":
                words = [name, os.readlink(f"/proc/self/fd/{arguments[0]}")]
            here = re.search(self.pattern, " ".join(words)) is not None
            with ONE:
                self.n -= here
                stops = here and self.n == 0
            if stops and not self.after:
                os.kill(os.getpid(), signal.SIGSTOP)
            try:
                return change(*arguments, **named)
            finally:
                if stops and self.after:
                    os.kill(os.getpid(), signal.SIGSTOP)

        return watched


def _begin(folder: str) -> None:
    from distmm.job import lock

    os.chdir(folder)
    lock.machine = lambda: "another machine"  # type: ignore[attr-defined]


def _call(client: Any, call: str, arguments: tuple[str, ...], options: dict[str, Any]) -> None:
    """Do a job, and end this process; what it says goes to a file."""
    from distmm import job
    from distmm.errors import InputError, Stopped

    try:
        if call == "multiply":
            multiply(client, *arguments, **options)
        else:
            getattr(job, call)(*arguments, client=client, **options)
    except (InputError, Stopped) as error:
        Path(SAID).write_text(str(error))
        os._exit(REFUSED if isinstance(error, InputError) else STOPPED)
    os._exit(0)


def run_all(folder: str, moment: Moment, call: str, arguments: tuple[str, ...], options: dict[str, Any]) -> None:
    """Client, scheduler and workers in one process: a machine that is suspended."""
    import dask
    from distributed import Client, LocalCluster

    _begin(folder)
    moment.install()
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        _call(client, call, arguments, options)


def run_client(folder: str, questions: int, call: str, arguments: tuple[str, ...], options: Any) -> None:
    """A client alone, which asks a silent scheduler some times before it gives up."""
    from distributed import Client

    from distmm.clusters import waiting

    _begin(folder)
    waiting.REQUESTS, waiting.ANSWER_SECONDS = questions, 0.5
    with Client(scheduler_file="scheduler.json", timeout=120) as client:
        client.wait_for_workers(1, timeout=120)
        _call(client, call, arguments, options)


def run_scheduler(folder: str) -> None:
    """A scheduler alone."""
    from distributed import Scheduler

    _begin(folder)

    async def serve() -> None:
        async with Scheduler(port=0, dashboard=False, scheduler_file="scheduler.json") as scheduler:
            await scheduler.finished()

    asyncio.run(serve())


def run_worker(folder: str, moment: Moment | None) -> None:
    """A worker alone."""
    from distributed import Worker

    _begin(folder)
    if moment is not None:
        moment.install()
    until(lambda: os.path.exists("scheduler.json"))

    async def serve() -> None:
        async with Worker(scheduler_file="scheduler.json", nthreads=1, dashboard=False) as worker:
            await worker.finished()

    asyncio.run(serve())


def started(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("forkserver").Process(target=target, args=(os.getcwd(), *arguments))
    process.start()
    return process


def asleep(process: BaseProcess) -> bool:
    assert process.is_alive(), Path(SAID).read_text() if os.path.exists(SAID) else "it has ended"
    return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


def wake(process: BaseProcess) -> None:
    os.kill(process.pid or 0, signal.SIGCONT)


@contextmanager
def killed_at_the_end(*processes: BaseProcess) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def seen(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and times of all files, but of what the processes say."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in (SAID, "scheduler.json"):
            found[str(path)] = path.read_bytes(), path.stat().st_mtime_ns
    return found

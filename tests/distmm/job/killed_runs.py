"""Runs of a job that a real SIGKILL ends at a chosen event: so many markers, a change of files, half a block written.

Each run is in a process of its own. Its cluster is given, and outlives it, or is in this process and dies with it.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

import pytest
from distributed import Client, LocalCluster

from distmm import job
from distmm.storage import flat, zarr_target
from tests.until import until

Event = Literal["markers", "changes", "write", "held"]

EVENTS: tuple[Event, ...] = ("markers", "changes", "write", "held")

# Seconds that a run waits for a write of an earlier run, which may be held until this run has ended (60 elsewhere).
ENDING_SECONDS = 0.2

# Python's audit events for changes of names and files. HDF5 and `renameat2` are not audited, but what follows them is.
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.utime"}


def markers(out: str) -> dict[str, int]:
    """Markers of an output by name, and when they were written. While a job is taken over, they may lie deeper."""
    found = {}
    for folder, _, names in os.walk(f"{out}.job"):
        if os.path.basename(folder) == "done":
            found.update({n: os.stat(os.path.join(folder, n)).st_mtime_ns for n in names if n.endswith(".json")})
    return found


class Enough(job.Stop):
    """Acts once an output has so many markers more than at first."""

    def __init__(self, out: str, more: int, act: Callable[[Enough], object]) -> None:
        super().__init__()
        self.out, self.enough, self.act = out, more + len(markers(out)), act

    @property
    def reason(self) -> str | None:
        if len(markers(self.out)) >= self.enough:
            self.act(self)
        return super().reason


@contextmanager
def half_way_through_write(count: int, act: Callable[[], object]) -> Iterator[None]:
    """Act when half of the rows of a block are in its file: a block of this process, after `count` others."""
    numbers, write = itertools.count(), flat.write_rows

    def write_rows(file: Any, offset: int, width: int, row: int, column: int, block: Any) -> None:
        if next(numbers) == count:
            write(file, offset, width, row, column, block[: len(block) // 2])
            file.flush()
            act()
        write(file, offset, width, row, column, block)

    with pytest.MonkeyPatch.context() as patch:
        for module in (flat, zarr_target):
            patch.setattr(module, "write_rows", write_rows)
        yield


@dataclass
class KilledRun:
    """A run, and the event at which it is killed. It ends as other runs if that event does not come.

    Attributes
    ----------
    event : {"markers", "changes", "write", "held"}
        What is counted: markers; changes of names and files by the process that is killed; blocks that are written, the
        last one by half. "held": that write goes on only after `release`.
    count : int
        How many of them come before the kill.
    cluster : LocalCluster or None
        A cluster of one worker in this process, that outlives the run. None: all processes of the job die.
    """

    event: Event
    count: int
    cluster: LocalCluster | None
    held: bool = False
    _go_on: threading.Event = field(default_factory=threading.Event)

    def play(self, out: str, call: dict[str, Any] | None) -> tuple[int, int] | None:
        """Begin (`call`) or resume a job of `out` in this folder. Return its blocks and those kept; None if killed."""
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        address = None if self.cluster is None else self.cluster.scheduler_address
        known, ended = self._clients(), threading.Event()
        process = context.Process(
            target=_run, args=(sender, address, os.getcwd(), self.event, self.count, out, call), name="distmm-killed"
        )

        def kill() -> None:
            self.held = self.event == "held"
            process.kill()
            ended.wait(240)  # only one thread may join a process
            if self.held:
                self._go_on.wait(240)

        with ExitStack() as stack:
            if self.cluster is not None and self.event in ("write", "held"):
                stack.enter_context(half_way_through_write(self.count, kill))
            process.start()
            sender.close()
            process.join(120)
            ended.set()
            assert process.exitcode is not None, "the run neither ended nor was killed"
        until(lambda: self._clients() == known, "the scheduler has not noticed the client's end")
        if process.exitcode == -signal.SIGKILL:
            return None
        said = receiver.recv() if receiver.poll() else None
        assert process.exitcode == 0, f"exit code {process.exitcode}: {said}"
        return said

    def release(self) -> None:
        """Let the write go on that was held."""
        self.held = False
        self._go_on.set()

    def _clients(self) -> set[str]:
        return set() if self.cluster is None else set(self.cluster.scheduler.clients)


def _run(
    pipe: Connection, address: str | None, folder: str, event: Event, count: int, out: str, call: dict[str, Any] | None
) -> None:
    """Be the process of a run."""
    os.chdir(folder)
    logging.getLogger("distributed").setLevel(logging.CRITICAL + 1)  # its workers die without a word
    try:
        pipe.send(_play(address, event, count, out, call))
    except BaseException:
        pipe.send(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _play(address: str | None, event: Event, count: int, out: str, call: dict[str, Any] | None) -> tuple[int, int]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(flat, "ENDING_SECONDS", ENDING_SECONDS)
        if address is None:
            own = LocalCluster(
                n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0",
                scheduler_kwargs={"dashboard": False},
            )  # fmt: skip
            address = stack.enter_context(own)
            if event in ("write", "held"):
                stack.enter_context(half_way_through_write(count, _die))
        client = stack.enter_context(Client(address, set_as_default=False))
        stop = Enough(out, count, lambda _: _die()) if event == "markers" else job.Stop()
        if event == "changes":
            _die_before_change(count, os.path.abspath(out))
        if call is None:
            summary = job.resume(out, client=client, stop=stop)
        else:
            summary = job.multiply("A.npy", "B.npy", out, client=client, stop=stop, **call)
        return summary.blocks, summary.kept


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # no further step in this thread before the signal comes


def _die_before_change(count: int, path: str) -> None:
    """Kill this process before a change of the files of the output `path` or its job, after `count` other changes."""
    numbers, writes = itertools.count(), os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hook(event: str, args: tuple[Any, ...]) -> None:
        changes = event in CHANGES or (event == "open" and args[2] & writes)
        if changes and str(args[0]).startswith(path) and next(numbers) == count:
            _die()

    sys.addaudithook(hook)

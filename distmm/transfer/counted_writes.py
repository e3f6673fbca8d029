"""The writes of one run, counted in every process: after the end of the run none of its tasks writes.

A *run* is one call with `out=`, or one run of a job. Cancelling a task does not stop it once a worker has begun it. So
tasks name their run when they begin to write. A process that has been told that the run has ended begins no write of
it, and can tell when its writes that have begun are done.

Writes to the client's memory are not counted. They need a lease (`distmm.transfer.write_lease`), which also stops lost
workers.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from distmm.all_workers import everywhere

__all__ = ["CountedRun", "CountedTarget"]

_running: Counter[str] = Counter()  # by run: the writes that this process has begun and not finished
_ended: set[str] = set()  # runs that were stopped before their end; 100 bytes each
_changed = threading.Condition()


@dataclass(frozen=True)
class CountedRun:
    """One run by its id, which is random and never used again."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def check(self) -> None:
        """Raise `RuntimeError` if this process has been told that the run has ended."""
        if self.id in _ended:
            raise RuntimeError("the call has ended: nothing more is written into its out")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count a write.

        Raises
        ------
        RuntimeError
            If the run has ended; nothing may be written then.
        """
        with _changed:
            self.check()
            _running[self.id] += 1
        try:
            yield
        finally:
            with _changed:
                _running[self.id] -= 1
                if not _running[self.id]:
                    del _running[self.id]
                _changed.notify_all()

    def end(self, client: Client | None, seconds: float | None = None) -> None:
        """Let no process begin a write of this run, and wait for the writes that have begun.

        A worker that the scheduler has lost cannot be told. It finishes the block that it is writing.

        Parameters
        ----------
        client : distributed.Client or None
            The client whose workers write; None if threads of this process write.
        seconds : float, optional
            How long to wait; by default without a limit.
        """
        try:
            if client is None:
                _end(self.id, seconds)
            else:
                everywhere(client, _end_on_worker, self.id, seconds)
        except BaseException as error:
            where = "this process" if client is None else "workers"
            error.add_note(f"out is not at rest: {where} may still write the blocks that are begun")
            raise


@dataclass(frozen=True)
class CountedTarget:
    """An array as the tasks of one run write to it."""

    array: Any
    run: CountedRun = field(default_factory=CountedRun)

    def __setitem__(self, index: Any, block: Any) -> None:
        with self.run.writing():
            self.array[index] = block

    def __dask_tokenize__(self) -> str:
        return self.run.id


def _end(run: str, seconds: float | None) -> None:
    """Stop this process from beginning a write of a run, and wait for the writes that it has begun."""
    with _changed:
        _ended.add(run)
        _changed.wait_for(lambda: not _running[run], seconds)


async def _end_on_worker(run: str, seconds: float | None) -> None:
    """Do the same on a worker, without blocking its event loop."""
    await asyncio.to_thread(_end, run, seconds)

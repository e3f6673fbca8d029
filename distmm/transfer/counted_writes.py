"""The writes of one run, counted in every process: after the end of the run none of its tasks writes.

A *run* is one call with `out=`, or one run of a job. A cancelled task still finishes if a worker has started it. So
each task registers its writes with its run. `CountedRun.end` tells all processes that the run has ended: they start no
further write of it, and report when their running writes are done.

Writes to the client's memory are not counted. They need a lease (`distmm.transfer.write_lease`), which also stops lost
workers.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from distmm.all_workers import everywhere, in_thread

_running: Counter[str] = Counter()  # by run: number of unfinished writes of this process
_ended: set[str] = set()  # runs that have ended early; 100 bytes each
_changed = threading.Condition()


@dataclass(frozen=True)
class CountedRun:
    """One run, by a random id that is never used again."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def check(self) -> None:
        """Raise `RuntimeError` if the run has ended, as far as this process knows."""
        if self.id in _ended:
            raise RuntimeError("the call has ended: its tasks no longer write into out")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count the write in the ``with`` block.

        Raises
        ------
        RuntimeError
            If the run has ended. The block is not executed then.
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
        """Stop all processes from starting writes of this run, and wait for the running writes.

        A worker that the scheduler has lost does not get the message. It finishes the block that it is writing.

        Parameters
        ----------
        client : distributed.Client or None
            The client whose workers write; None if threads of this process write.
        seconds : float, optional
            Limit of the wait; none by default.
        """
        try:
            if client is None:
                _end(self.id, seconds)
            else:
                everywhere(client, in_thread, _end, self.id, seconds)
        except BaseException as error:
            where = "this process" if client is None else "workers"
            error.add_note(f"out is not at rest: {where} may still write the blocks that are begun")
            raise


@dataclass(frozen=True)
class CountedTarget:
    """An array whose assignments are counted as writes of a run."""

    array: Any
    run: CountedRun = field(default_factory=CountedRun)

    def __setitem__(self, index: Any, block: Any) -> None:
        with self.run.writing():
            self.array[index] = block

    def __dask_tokenize__(self) -> str:
        return self.run.id


def _end(run: str, seconds: float | None) -> None:
    """Stop this process from starting writes of a run, and wait for its running writes."""
    with _changed:
        _ended.add(run)
        _changed.wait_for(lambda: not _running[run], seconds)

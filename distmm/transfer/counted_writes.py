"""Tasks that write into an array: no longer than the call lasts that asked for it."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from distmm.all_workers import everywhere

__all__ = ["Target"]

# Seconds between two looks at the workers, each of which costs a round trip.
POLL_SECONDS = 0.05

_running: Counter[str] = Counter()  # calls, and how many blocks this process is writing for each
_ended: set[str] = set()  # calls that were interrupted: 100 bytes each
_looking = threading.Lock()


@dataclass(frozen=True)
class Target:
    """An array as the tasks of one call write to it.

    Every process counts the writes that are under way, and begins none when it has been told that the call has ended.
    """

    array: Any
    call: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __setitem__(self, index: Any, block: Any) -> None:
        with _writing(self.call):
            self.array[index] = block

    def __dask_tokenize__(self) -> str:
        return self.call

    def end(self, client: Client | None) -> None:
        """Let nobody begin to write any more, and wait for those who do: workers of `client`, or threads here.

        A worker that the scheduler has lost cannot be asked; it writes the block to its end that it has begun.
        """
        writing: list[str] = ["workers"]
        try:
            while writing:
                left = {"this process": _end(self.call)} if client is None else everywhere(client, _end, self.call)
                writing = [place for place, blocks in left.items() if blocks]
                time.sleep(POLL_SECONDS if writing else 0)
        except BaseException as error:
            error.add_note(f"out is not at rest: {', '.join(writing)} may still write the blocks that are begun")
            raise


@contextmanager
def _writing(call: str) -> Iterator[None]:
    with _looking:
        if call in _ended:
            raise RuntimeError("the call has ended: nothing more is written into its out")
        _running[call] += 1
    try:
        yield
    finally:
        with _looking:
            _running[call] -= 1
            if not _running[call]:
                del _running[call]


def _end(call: str) -> int:
    """Count the blocks that this process is writing for a call, and let it begin no more. Runs on workers."""
    with _looking:
        _ended.add(call)
        return _running[call]

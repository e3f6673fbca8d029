"""Reports of workers to the client that the block of C is computed which a task of a job checks and writes.

All jobs of a scheduler share one topic of Dask's events. Dask keeps a topic, its last events and the client's handler
for ever, so a topic for each job would fill the memory of a scheduler that lives long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Client, get_worker

TOPIC = "distmm-made"

Note = Callable[[Any], None]

_notes: WeakKeyDictionary[Client, dict[str, Note]] = WeakKeyDictionary()  # those of the jobs that run
_lock = threading.Lock()


def report(job: str) -> None:
    """Report that the block is computed which this task of a job processes. Runs on workers."""
    worker = get_worker()
    worker.log_event(TOPIC, (job, worker.get_current_task()))


@contextmanager
def reported_to(note: Note, job: str, client: Client) -> Iterator[None]:
    """Call `note` with the key of each task of a job that reports."""

    def take(event: tuple[float, Any]) -> None:
        of, key = event[1]
        if (to := notes.get(of)) is not None:  # the topic also has the reports of other clients' jobs
            to(tuple(key))

    with _lock:
        notes = _notes.setdefault(client, {})
        notes[job] = note
        client.subscribe_topic(TOPIC, take)
    try:
        yield
    finally:
        with _lock:
            del notes[job]
            if not notes and client.status == "running":
                client.unsubscribe_topic(TOPIC)

"""Waits for the tasks of a cluster: inside of other tasks, and for a scheduler that may have stopped answering.

A process may be stopped, or its host may hang. TCP detects a network that is cut off: Dask sets its timeouts
(``distributed.comm.timeouts.tcp``, 30 s). But an operating system still acknowledges data for a stopped process, so a
client would wait for its answer without end. So a thread sends requests to the scheduler, and closes the client after
no answer for `REQUESTS` times `ANSWER_SECONDS`. Calls that wait for the scheduler then raise an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from distributed import Client, rejoin, secede

from distmm.worker.dask_internals import in_task

logger = logging.getLogger(__name__)

# Together 5 minutes, the time after which a scheduler drops a silent worker (``distributed.scheduler.worker-ttl``). One
# request is not enough: if this process was stopped itself, its first request times out.
REQUESTS, ANSWER_SECONDS = 10, 30.0


@contextmanager
def unless_silent(client: Client) -> Iterator[None]:
    """Close a client if its scheduler stops answering during the ``with`` block."""
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(client, ended), name="distmm-silence", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()


def _watch(client: Client, ended: threading.Event) -> None:
    scheduler, unanswered = client.scheduler, 0
    while not ended.wait(0 if unanswered else ANSWER_SECONDS) and client.status == "running":
        try:
            client.sync(scheduler.echo, data=0, callback_timeout=ANSWER_SECONDS)
        except TimeoutError:
            unanswered += 1
        except Exception:  # the connection is lost or closed, and waiting calls have raised an error
            return
        else:
            unanswered = 0
        if unanswered == REQUESTS and not ended.is_set():
            seconds = REQUESTS * ANSWER_SECONDS
            logger.error("the scheduler at %s has not answered for %.0f s: it is lost", scheduler.address, seconds)
            with suppress(TimeoutError):
                client.close(timeout=ANSWER_SECONDS)
            return


@contextmanager
def seceded() -> Iterator[None]:
    """Give the thread of the task that calls this to other tasks, for a ``with`` block that waits for other tasks.

    Without this, tasks that wait for tasks could occupy all threads of the workers. Outside of tasks it does nothing.
    """
    with ExitStack() as after:
        # Not of a task that has seceded itself (`worker_client`), or that a user's executor runs.
        with suppress(KeyError, AttributeError):
            if in_task():
                secede()
                after.callback(rejoin)
        yield

"""Waits for the tasks of a cluster: inside of other tasks, and for a scheduler that may have stopped answering.

A process may be stopped, or its host may hang. TCP detects a network that is cut off: Dask sets its timeouts
(``distributed.comm.timeouts.tcp``, 30 s). But an operating system still acknowledges data for a stopped process, so a
client would wait for its answer without end. So a thread sends requests to the scheduler, and closes the client after
no answer for `REQUESTS` times `ANSWER_SECONDS`. Calls that wait for the scheduler then raise an error.

Dask pauses a worker whose memory is nearly full. If all workers are paused, or none is left, no task runs, and nothing
tells the client. So the thread logs a warning.

Dask cancels tasks that read persisted chunks of another cluster, and says no more than that they lost dependencies.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from distributed import Client, rejoin, secede

from distmm.all_workers import workers_of
from distmm.errors import InputError
from distmm.worker.dask_internals import in_task

logger = logging.getLogger(__name__)

# Together 5 minutes, the time after which a scheduler drops a silent worker (``distributed.scheduler.worker-ttl``). One
# request is not enough: if this process was stopped itself, its first request times out.
REQUESTS, ANSWER_SECONDS = 10, 30.0


# Clients that have been told that no worker runs. The waits of a job are in one another.
_told: weakref.WeakSet[Client] = weakref.WeakSet()


@contextmanager
def watched(client: Client | None) -> Iterator[None]:
    """Watch a cluster during the ``with`` block, which waits for its tasks. Without a client it does nothing.

    Warn if no worker runs. Close the client if the scheduler stops answering.

    Raises
    ------
    InputError
        If the cluster does not have persisted chunks that a task reads.
    """
    if client is None:
        yield
        return
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(client, ended), name="distmm-silence", daemon=True)
    watch.start()
    try:
        yield
    except CancelledError as error:
        if getattr(error, "reason", None) != "lost dependencies":
            raise
        raise InputError(
            "this cluster does not have all persisted chunks of the operands: they are on another one, or lost, by "
            "client.restart(), with a worker, or when the client that persisted them was closed. Persist the operands "
            "again, or give the client of their cluster"
        ) from error
    finally:
        ended.set()


def _watch(client: Client, ended: threading.Event) -> None:
    scheduler, unanswered = client.scheduler, 0
    while not ended.wait(0 if unanswered else ANSWER_SECONDS) and client.status == "running":
        try:
            _tell_stopped(client, workers_of(client, ANSWER_SECONDS))
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


def _tell_stopped(client: Client, workers: dict[str, dict[str, Any]]) -> None:
    """Log a warning if there are no workers or all are paused, unless the client was told since one ran."""
    paused = [address for address, facts in workers.items() if facts["status"] == "paused"]
    if len(paused) < len(workers):
        _told.discard(client)
    elif client not in _told:
        _told.add(client)
        logger.warning("%s", _why_none_runs(paused))


def _why_none_runs(paused: list[str]) -> str:
    if not paused:
        return (
            "the cluster has no workers, and no task runs until some have started. Start some, or a new cluster if "
            "Dask has given them up: it does not replace a worker of a local cluster that ends twice within the "
            "setting distributed.deploy.lost-worker-timeout (15 s)"
        )
    more = f" and {len(paused) - 3} more" if len(paused) > 3 else ""
    return (
        "all workers are paused, since their memory is nearly full, and run no task: "
        f"{', '.join(sorted(paused)[:3])}{more}. Delete the persisted arrays that they hold, or start them with more "
        "memory (memory_limit=, --memory-limit)"
    )


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

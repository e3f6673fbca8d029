"""A scheduler that does not answer any more, although its machine does: a stopped process, a host that hangs.

A network that is cut off is noticed by TCP: Dask sets its timeouts (``distributed.comm.timeouts.tcp``, 30 s). But the
system of a machine acknowledges what is sent to a process that has been stopped, and a client would wait for it for
ever. So a thread asks the scheduler again and again, and closes the client when there has been no answer for
`QUESTIONS` times `ANSWER_SECONDS`. What waits for the scheduler then ends in an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from distributed import Client

__all__ = ["unless_silent"]

logger = logging.getLogger(__name__)

# As long as a scheduler waits for a worker, by default (``distributed.scheduler.worker-ttl``). Several questions: if
# this process itself was stopped, the first one after it is late.
QUESTIONS, ANSWER_SECONDS = 10, 30.0


@contextmanager
def unless_silent(client: Client) -> Iterator[None]:
    """Close a client while something waits for its scheduler, if that has become silent."""
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
        except Exception:  # the connection is lost, or closed: whoever waits has an error, too
            return
        else:
            unanswered = 0
        if unanswered == QUESTIONS and not ended.is_set():
            seconds = QUESTIONS * ANSWER_SECONDS
            logger.error("the scheduler at %s has not answered for %.0f s: it is lost", scheduler.address, seconds)
            with suppress(TimeoutError):
                client.close(timeout=ANSWER_SECONDS)
            return

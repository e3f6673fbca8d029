"""Events that a scheduler sends to clients, which handle them by `Client.subscribe_topic`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler


def tell(scheduler: Scheduler, clients: Iterable[str], topic: str, what: str | None = None) -> None:
    """Send an event to clients, by their ids. Those that have just died get none. Runs on the scheduler.

    A worker whose tasks call distmm is a client, too. `Scheduler.send_all` would log the lost connection of each dead
    client as a critical error.
    """
    event = {"op": "event", "topic": topic, "event": (time.time(), what)}
    for client in clients:
        with suppress(KeyError, OSError):  # Dask's errors of lost connections are OSErrors
            scheduler.client_comms[client].send(event)

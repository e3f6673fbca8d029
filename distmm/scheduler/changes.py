"""Messages to clients that what they know of the cluster has changed."""

from __future__ import annotations

import time

from distributed.scheduler import Scheduler

# Topic of these messages.
CHANGES_TOPIC = "distmm-changed"


class Changes:
    """Clients that are told of the next change of the workers, or of their memory."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.told: dict[str, set[str]] = {"workers": set(), "memory": set()}

    def tell(self, client: str) -> None:
        """Tell a client of the next change, once: it asks again, and is then told again."""
        for clients in self.told.values():
            clients.add(client)

    def announce(self, what: str) -> None:
        """Tell the clients that wait for this change."""
        if clients := self.told[what]:
            self.told[what] = set()
            event = {"op": "event", "topic": CHANGES_TOPIC, "event": (time.time(), what)}
            self.scheduler.send_all({client: [event] for client in clients}, {})

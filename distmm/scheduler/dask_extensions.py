"""Adaptive clusters, the Active Memory Manager and messages to clients, by private parts of Dask's scheduler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import dask
from dask.utils import parse_timedelta
from distributed.scheduler import Scheduler, TaskState


class AdaptiveTarget:
    """The number of workers that an adaptive cluster asks the scheduler for, with the product tasks that are held.

    Dask counts the tasks that are ready. Of each chain of a product that is one.

    Parameters
    ----------
    scheduler : Scheduler
    waiting : callable
        Yields for each product one of its tasks, how many are to be done, and how many may run at the same time.

    Attributes
    ----------
    asked : bool
        Whether the cluster is adaptive: it has asked.
    """

    def __init__(self, scheduler: Scheduler, waiting: Callable[[], Iterable[tuple[TaskState, int, int]]]) -> None:
        self.scheduler, self.waiting, self.asked = scheduler, waiting, False
        self.without = scheduler.handlers["adaptive_target"]
        scheduler.handlers["adaptive_target"] = self.target

    def target(self, target_duration: float | str | None = None) -> int:
        """Return the number of workers with which the tasks end in `target_duration`, seconds or as Dask writes it."""
        self.asked, scheduler = True, self.scheduler
        least: int = self.without(target_duration=target_duration)
        within = parse_timedelta(target_duration or dask.config.get("distributed.adaptive.target-duration"))
        threads = scheduler.total_nthreads / max(1, len(scheduler.workers))
        wanted = 0.0
        for ts, tasks, parallel in self.waiting():
            wanted += min(parallel, tasks * scheduler._get_prefix_duration(ts.prefix) / within)
        return int(max(least, math.ceil(wanted / max(1.0, threads))))


class MemoryManager:
    """Dask's Active Memory Manager, paused while products run.

    Every 2 s it drops one of two replicas of a block, perhaps the one at home. The block would then travel again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.manager = scheduler.extensions.get("amm")
        self.paused = False  # by `pause`

    def pause(self, busy: bool) -> None:
        """Stop it, if it runs. If distmm is not `busy` any more: start it again, if it was stopped here."""
        if busy and self.manager is not None and self.manager.running:
            self.manager.stop()
            self.paused = True
        elif not busy and self.paused:
            self.manager.start()
            self.paused = False


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

"""Adaptive clusters, the Active Memory Manager, messages to clients, order and keys of tasks: private parts of Dask."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dask
import dask.optimization
import dask.order
from dask.utils import parse_timedelta

from distmm.graph.dask_tasks import PlacedTask, Task, TaskRef, is_chunk_of_c, needs, unfused
from distmm.transfer import events

if TYPE_CHECKING:
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
            events.tell(self.scheduler, clients, CHANGES_TOPIC, what)


_dasks_order: Callable[..., dict[Any, Any]] = dask.order.order


def order(dsk: Mapping[Any, Any], *args: Any, **options: Any) -> dict[Any, Any]:
    """Return Dask's order of the tasks of a graph; chunks of C that are views come with the blocks they are cut from.

    Dask looks at each pair of a lazy chunk of A or B and a result that depends on it. 64 x 64 x 64 chunks are 17
    million such pairs with 2 x 2 blocks of C. So views that are results, and results that read a view alone, are left
    out, and get the places of their blocks. For each chunk that is in memory, Dask copies the set of what a task reads:
    the chunks in memory, which have no place, are left out, too. A graph without products is ordered as ever.
    """
    if not any(isinstance(unfused(task), PlacedTask) for task in dsk.values()):
        return _dasks_order(dsk, *args, **options)
    views = {key for key, task in dsk.items() if is_chunk_of_c(task)}
    readers = Counter(each for key in dsk for each in needs(dsk, key))
    follows: dict[Any, Any] = {}
    # First the results that read a view alone: a view that nothing else reads is then a result itself.
    for tasks, sources in (dsk.keys() - views, views), (views, dsk.keys()):
        for key in tasks:
            read = needs(dsk, key)
            if not readers[key] and len(read) == 1 and read <= sources:
                (follows[key],) = read
                readers[follows[key]] -= 1
    ordered = {key: task for key, task in dsk.items() if key not in follows}
    for key in ordered:
        read = needs(ordered, key)
        if not read <= ordered.keys():
            ordered[key] = Task(key, tuple, *map(TaskRef, read & ordered.keys()))
    found = _dasks_order(ordered, *args, **options)
    for key in reversed(follows):
        found[key] = found[follows[key]]
    return found


_dasks_fused_key: Callable[..., Any] = dask.optimization.default_fused_keys_renamer


def fused_key(keys: Sequence[Any], *args: Any, **options: Any) -> Any:
    """Return the key of the task that Dask makes of a chain of tasks: that of the last one, if distmm made the first.

    Dask gives it a new key, and adds a task that stands for the last one. That takes a GPU worker some 0.8 ms.
    """
    made = isinstance(keys[0], tuple) and str(keys[0][0]).startswith("distmm-")
    return keys[-1] if made else _dasks_fused_key(keys, *args, **options)

"""Which tasks of a scheduler read arrays that clients have lent (`distmm.transfer.loans`).

Tasks are counted by what they refer to, whatever their names: Dask's optimisers fuse and rename them. Objects are no
measure of it: a scheduler keeps its last thousand messages to each worker, and with them tasks that it has forgotten.

This module uses `Scheduler.stream_handlers`, which Dask's own extensions use, and the order in which a scheduler
handles a client's messages. ``tests/distmm/transfer/test_loans.py`` fails first when they change.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from distmm.transfer.client_array import ClientArray
from distmm.transfer.events import tell
from distmm.transfer.loans import TOPIC


class LoanReaders(SchedulerPlugin):  # type: ignore[misc]  # Dask's classes are untyped
    """Counts the tasks that read each loan, and answers clients that ask for the end of one."""

    name = "distmm-loans"

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.read: dict[Any, set[str]] = {}  # names of the loans that a task reads, by key
        self.readers: Counter[str] = Counter()
        self.asked: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)  # clients and topics, by loan
        self._count(scheduler.tasks)
        self._subscribe = scheduler.stream_handlers["subscribe-topic"]
        scheduler.stream_handlers["subscribe-topic"] = self._subscribed

    def update_graph(self, scheduler: Scheduler, *, tasks: Iterable[Any], **kwargs: Any) -> None:
        """Count the tasks of a new graph. Those that have run, or are under way, have been counted."""
        known = self.scheduler.tasks
        self._count(key for key in tasks if known[key].state == "released")

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Stop counting a task that is forgotten."""
        if finish == "forgotten" and (names := self.read.pop(key, None)):
            self.readers.subtract(names)
            for name in names:
                if not self.readers[name]:
                    del self.readers[name]
                    for client, topic in self.asked.pop(name, ()):
                        tell(self.scheduler, [client], topic)

    def restart(self, scheduler: Scheduler) -> None:
        """Answer all questions: a scheduler that starts again has no tasks."""
        asked = [each for questions in self.asked.values() for each in questions]
        self.read, self.readers, self.asked = {}, Counter(), defaultdict(list)
        for client, topic in asked:
            tell(self.scheduler, [client], topic)

    def _count(self, keys: Iterable[Any]) -> None:
        for key in keys:
            if key not in self.read and (found := _lent_to(self.scheduler.tasks[key].run_spec)):
                self.read[key] = {array.name for array in found}
                self.readers.update(self.read[key])
                for array in found:
                    array.counted()

    def _subscribed(self, topic: str, client: str) -> None:
        """Handle a subscription. Those to topics of loans are questions, for which the scheduler keeps no topic."""
        if not topic.startswith(TOPIC):
            self._subscribe(topic=topic, client=client)
        elif self.readers[name := topic.removeprefix(TOPIC).split()[0]]:
            self.asked[name].append((client, topic))
        else:
            tell(self.scheduler, [client], topic)


def install(dask_scheduler: Scheduler) -> None:
    """Let a scheduler count readers and answer questions, if it does not already. Runs on the scheduler."""
    if LoanReaders.name not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(LoanReaders(dask_scheduler))


def _lent_to(task: Any) -> list[ClientArray]:
    """List the arrays on loan in a task: in its arguments, in containers, and in tasks that were fused into it."""
    found, left = [], [task]
    while left:
        value = left.pop()
        kind: Any = type(value)
        if kind is ClientArray:
            found += [value] if value.name else []
        elif (contents := _contents(kind)) is not None:
            left += contents(value)
    return found


@lru_cache(maxsize=256)  # types of pickled classes are new in each graph, and a scheduler may live for months
def _contents(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    """Return a function that lists what an object of this type has in it; None for objects that have nothing.

    The answer is kept for each type: a step over blocks of many chunks refers to hundreds of tasks.
    """
    if issubclass(kind, dict):
        return dict.values
    if issubclass(kind, (list, tuple, set, frozenset)):
        return iter
    if hasattr(kind, "dependencies"):  # a node of a graph, whose types have a private name
        names = [name for name in ("args", "kwargs", "value") if hasattr(kind, name)]
        return lambda node: [getattr(node, name) for name in names]
    return None

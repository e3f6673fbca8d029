"""Moves of the model in `simulated.py`, in an order that a seed draws: clients, workers, late reports and faults.

Any order of moves is a virtual time. What takes long is a move that comes late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from distmm.graph.placement import Key
from tests.distmm.scheduler.disturbed_faults import Faults
from tests.distmm.scheduler.drawn_products import Drawn, graphs
from tests.distmm.scheduler.simulated import Model
from tests.distmm.scheduler.simulated_tasks import Worker

__all__ = ["Play", "Request", "sent"]

# A chance of each move; the expected number of moves between two faults is its inverse.
FAULT = 0.03


@lru_cache(1000)
def sent(drawn: Drawn) -> tuple[tuple[list[Key], Mapping[Key, Any]], ...]:
    """Return the graphs of a product, each with the keys that are wanted of it; without tasks that they do not need."""
    return tuple((keys, _needed(keys, dict(graph))) for keys, graph in graphs(drawn))


def _needed(keys: list[Key], graph: Mapping[Key, Any]) -> dict[Key, Any]:
    found, stack = dict.fromkeys(keys), list(keys)
    while stack:
        new = [key for key in graph[stack.pop()].dependencies if key not in found]
        found |= dict.fromkeys(new)
        stack += new
    return {key: task for key, task in graph.items() if key in found}


@dataclass
class Request:
    """What a client asks for, and still has to send of it."""

    drawn: Drawn
    wanted: list[Key] = field(default_factory=list)
    graphs: list[tuple[list[Key], Mapping[Key, Any]]] = field(default_factory=list)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.graphs = list(sent(self.drawn))


class Play:
    """One schedule.

    Parameters
    ----------
    model : Model
    products : list of Drawn
        What clients ask for, at any time.
    faults : Faults
        How many of each happen, at most.
    """

    def __init__(self, model: Model, products: list[Drawn], faults: Faults) -> None:
        self.model, self.random, self.fail_share = model, model.random, faults.fail
        self.requests = [Request(drawn) for drawn in products]
        self.late, self.patient, self.losses, self.stale = faults.late, True, 0, 0
        self.calm = faults == Faults()
        names = ("kill", "join", "cancel", "again", "retry")
        self.faults = [getattr(self, f"_{name}") for name in names for _ in range(getattr(faults, name))]
        self.moves: list[Callable[[], bool]] = [
            self._submit,
            self._decide,
            self._give,
            self._give,
            self._fetch,
            self._fetch_early,
            self._fetch_early,
            self._begin,
            self._begin,
            self._end,
            self._end,
            self._hear,
            self._hear,
            self._remove,
            self._let_go,
        ]

    def run(self) -> None:
        """Play to the end: until nothing can go on, and no fault is left."""
        while self._move():
            pass
        self.model.checks.idle()

    def end(self) -> None:
        """Let clients give up all results; nothing may be left then."""
        model = self.model
        self.faults.clear()
        model.unwant(list(model.wanted))
        self.run()
        assert not model.tasks, f"tasks are left that nobody wants: {list(model.tasks)[:4]}"
        left = {**vars(model.machine), **vars(model.machine.replicas)}
        names = [name for name, table in left.items() if name not in ("ranks", "replicas") and list(table)]
        assert not names, f"the state machine still has {names}"
        for worker in model.workers.values():
            assert not worker.data, f"{worker.address} still holds {list(worker.data)[:4]}"

    def _move(self) -> bool:
        if self.faults and self.random.random() < FAULT:
            self.faults.pop(self.random.randrange(len(self.faults)))()
        if all(worker.dead for worker in self.model.workers.values()):
            self._join()
        first = self.random.randrange(len(self.moves))
        for self.patient in (True, False):  # what may come late comes when nothing else can
            if any(move() for move in (*self.moves[first:], *self.moves[:first])):
                if not self.late:
                    self._catch_up()
                return True
        return False

    # What clients and the scheduler do

    def _submit(self) -> bool:
        sending = [request for request in self.requests if request.graphs]
        if not sending or (self.patient and self.random.random() < 0.5):
            return False
        request = self.random.choice(sending)
        wanted, graph = request.graphs.pop(0)
        request.wanted += wanted
        self.model.submit(wanted, graph)
        return True

    def _comes_later(self) -> bool:
        """Whether a message is still on its way."""
        return self.late and self.patient and self.random.random() < 0.8

    def _decide(self) -> bool:
        if self.model.machine.undecided:
            self.model.decide()
            return True
        return False

    def _catch_up(self) -> None:
        """Have the scheduler hear all that workers say, and decide at once: no block is held longer than it must be."""
        for worker in self.model.workers.values():
            while worker.reports:
                self.model.hear(worker)
        while self._decide():
            pass
        if self.calm:
            self.model.checks.replicas()

    def _give(self) -> bool:
        if tasks := self.model.runnable():
            self.model.start(self.random.choice(tasks))
            return True
        return False

    def _let_go(self) -> bool:
        """Let a client take an answer that it does not keep."""
        tasks = self.model.tasks
        for request in self.requests:
            if request.drawn.leaves:
                for key in request.wanted:
                    if key in self.model.wanted and tasks[key].state == "memory":
                        self.model.unwant([key])
                        return True
        return False

    # What workers do

    def _living(self) -> Iterator[Worker]:
        workers = [worker for worker in self.model.workers.values() if not worker.dead]
        self.random.shuffle(workers)
        return iter(workers)

    def _fetch(self) -> bool:
        for worker in self._living():
            if worker.asked:
                key = worker.asked.popleft()
                task = self.model.tasks.get(key)
                if task is not None and task.state == "memory":
                    self.model.fetch(worker, key)
                return True
        return False

    def _fetch_early(self) -> bool:
        """Let a worker fetch a block that a task given to it reads, before the task begins."""
        for worker in self._living():
            read = [need.key for task in worker.running if not task.begun for need in task.needs]
            missing = [key for key in read if key not in worker.data and key not in worker.asked]
            if missing and self.model.fetch(worker, self.random.choice(missing)):
                return True
        return False

    def _begin(self) -> bool:
        for worker in self._living():
            ready = [one for one in worker.running if not one.begun and worker.can_begin(one, self.model.all_workers)]
            if ready:
                self.model.begin(self.random.choice(ready))
                return True
        return False

    def _end(self) -> bool:
        for worker in self._living():
            if begun := [task for task in worker.running if task.begun]:
                self.model.end(self.random.choice(begun), self.random.random() < self.fail_share)
                return True
        return False

    def _hear(self) -> bool:
        """Let a report arrive. Reports of one worker keep their order; those of a dead one may be under way."""
        if self._comes_later():
            return False
        workers = [worker for worker in self.model.workers.values() if worker.reports]
        if not workers:
            return False
        self.model.hear(self.random.choice(workers))
        if self.late and self.random.random() < 0.1:
            self._repeat()
        return True

    def _repeat(self) -> None:
        """Tell the state machine again what it has been told, of a task that has gone or has not changed since."""
        event, task = self.random.choice(self.model.told) if self.model.told else ("", None)
        if task is None or task.where is None:
            return
        after = {"finished": "memory", "released": "released", "given_up": "failed"}
        now = self.model.tasks.get(task.key)
        if now is None or (now is task and after.get(event) == now.state):
            self.stale += 1
            getattr(self.model.machine, event)(task.key, task.where)

    # Faults

    def _kill(self) -> None:
        """Let a worker die; the scheduler sees it at some later move."""
        if worker := next(self._living(), None):
            worker.dead = True
            self.losses += 1
            if not self.late:
                self._remove()

    def _remove(self) -> bool:
        dead = [worker for worker in self.model.workers.values() if worker.dead]
        if not dead or self._comes_later():
            return False
        self.model.remove(self.random.choice(dead))
        if self.random.random() < 0.7:
            self._join()
        return True

    def _join(self) -> None:
        self.model.join(self.random.randrange(8))

    def _cancel(self) -> None:
        """Let a client give up a request, or some keys of it."""
        request = self.random.choice(self.requests)
        if self.random.random() < 0.5:
            request.graphs.clear()
            self.model.unwant(request.wanted)
        else:
            self.model.checks.changed = True
            self.model.unwant([key for key in request.wanted if self.random.random() < 0.5])

    def _again(self) -> None:
        """Let a client ask again for something, whatever has become of it."""
        self.model.checks.changed = True
        self.requests.append(Request(self.random.choice(self.requests).drawn))

    def _retry(self) -> None:
        self.model.retry()

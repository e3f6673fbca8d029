"""Tasks and workers of the model in `simulated.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distmm.graph.dask_tasks import PlacedTask, ProductTask
from distmm.graph.placement import Key, Placement
from tests.distmm.scheduler.drawn_products import nbytes

__all__ = ["Report", "Task", "Worker"]


@dataclass(eq=False, repr=False)
class Task:
    """A task as the scheduler knows it: its states are released, waiting, running, memory, failed and forgotten.

    Attributes
    ----------
    held : bool
        Whether it waits until the state machine starts it.
    address : str or None
        The worker to which it belongs; any other runs it while that one is dead.
    run : int
        Number of its run: reports of earlier ones are ignored.
    """

    key: Key
    spec: Any
    needs: list[Task] = field(default_factory=list)
    state: str = "released"
    held: bool = False
    address: str | None = None
    on: Worker | None = None  # which runs it
    run: int = 0
    begun: bool = False
    retries: int = 0
    copies: dict[Worker, None] = field(default_factory=dict)
    waiters: dict[Task, None] = field(default_factory=dict)
    readers: dict[Task, None] = field(default_factory=dict)  # tasks that the scheduler knows
    # Of product tasks, and what the state machine was told since they arrived last:
    done: bool = False  # it needs its operands no longer
    closed: bool = False  # its step does not wait for it
    left: bool = False  # it needs no slot

    def __post_init__(self) -> None:
        self.where: Placement | None = self.spec.placement if isinstance(self.spec, PlacedTask) else None
        self.product = isinstance(self.spec, ProductTask)
        self.operands: tuple[Key, ...] = self.spec.operands() if self.product else ()
        self.nbytes = nbytes(self.spec)

    @property
    def makes_block(self) -> bool:
        """Whether it makes a block of C, or its mirror image."""
        return self.where is not None and self.key[0] == self.where.product


@dataclass(frozen=True)
class Report:
    """What a worker says of a task: "done" or "failed" with the number of the run, or "holds", a replica."""

    what: str
    key: Key
    run: int = 0


@dataclass(eq=False, repr=False)
class Worker:
    """A worker as it is. The scheduler learns of that by its reports, one after another."""

    address: str
    dead: bool = False
    data: dict[Key, int] = field(default_factory=dict)  # bytes of each block
    asked: deque[Key] = field(default_factory=deque)  # replicas that it is to fetch
    reports: deque[Report] = field(default_factory=deque)
    running: dict[Task, None] = field(default_factory=dict)  # given to it, begun or not
    peak: int = 0

    def can_begin(self, task: Task, peers: Iterable[Worker]) -> bool:
        """Whether it has a thread for a task, and can have all that the task reads."""
        free = sum(other.begun for other in self.running) < 2
        return free and all(need.key in self.data or self._source(need.key, peers) for need in task.needs)

    def fetch(self, key: Key, peers: Iterable[Worker]) -> bool:
        """Fetch a replica, if somebody has it; return whether it travels."""
        if key in self.data or (source := self._source(key, peers)) is None:
            return False
        self.data[key] = source.data[key]
        if key in self.asked:
            self.asked.remove(key)
        self.reports.append(Report("holds", key))
        self.measure()
        return True

    def _source(self, key: Key, peers: Iterable[Worker]) -> Worker | None:
        return next((peer for peer in peers if key in peer.data and not peer.dead), None)

    def measure(self) -> None:
        """Note what is in memory, results that are being written among it."""
        self.peak = max(self.peak, sum(self.data.values()) + sum(task.nbytes for task in self.running if task.begun))

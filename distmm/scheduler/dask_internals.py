"""What distmm does to Dask's scheduler through its private parts. No other module of this package touches them.

Dask documents the attributes of `TaskState` and the states of tasks, but not that a plugin may change them. They were
seen on the versions of distributed in `VERSIONS_SEEN`. ``tests/distmm/scheduler/test_dask_internals.py`` fails first
when they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from distributed.protocol.pickle import dumps
from distributed.scheduler import Scheduler, TaskState

__all__ = [
    "HELD",
    "VERSIONS_SEEN",
    "MemoryManager",
    "copy_blocks",
    "drop_blocks",
    "fail",
    "hold",
    "is_held",
    "makers",
    "move_tasks",
    "park",
    "place",
    "start",
    "stranded",
    "to_run",
]

VERSIONS_SEEN = ("2026.7.1", "2026.8.0")

# A held task is restricted to this address, which no worker has. So the scheduler sends it to no worker. When the
# task's dependencies are in memory, the scheduler moves it to the state "no-worker". Users take that for an alarm, and
# `no-workers-timeout` would fail the task. `park` keeps it in "waiting": for its dependencies, and for this entry.
HELD = "distmm-held"


def hold(ts: TaskState, order: int) -> None:
    """Keep a task from being sent to a worker."""
    ts.worker_restrictions, ts.loose_restrictions = {HELD}, False
    _delay(ts, order)


def park(scheduler: Scheduler, ts: TaskState) -> None:
    """Move a held task that has just become "no-worker" to "waiting", until `place` and `start`.

    The restriction says that a task is held. The entry in `waiting_on` is only its consequence: Dask drops the entry of
    a task that it releases, and when the task is wanted again, this function is called again. A task that is lost,
    fails or is forgotten leaves nothing behind.

    A scheduler that checks itself (`distributed.scheduler.validate`) asserts that tasks wait for dependencies alone. It
    keeps held tasks in "no-worker".
    """
    if is_held(ts) and not scheduler.validate:
        del scheduler.unrunnable[ts]
        ts.state, ts.waiting_on = "waiting", {cast(TaskState, HELD)}


def is_held(ts: TaskState) -> bool:
    """Whether a task waits for `place`."""
    return HELD in (ts.worker_restrictions or ())


def place(ts: TaskState, address: str, order: int = 0) -> None:
    """Let a task run on one worker; on any worker while this one is dead and has no replacement."""
    ts.worker_restrictions, ts.loose_restrictions = {address}, True
    _delay(ts, order)


def _delay(ts: TaskState, order: int) -> None:
    """Add to the priority of a task. Dask starts the lowest one first."""
    if order:
        first, *rest = ts.priority
        ts.priority = (first + order, *rest)


def move_tasks(scheduler: Scheduler, old: str, new: str) -> None:
    """Place the tasks of a dead worker on its replacement."""
    for ts in scheduler.tasks.values():
        if ts.worker_restrictions and old in ts.worker_restrictions:
            ts.worker_restrictions = {new}


def start(scheduler: Scheduler, tasks: Iterable[TaskState]) -> None:
    """Send tasks that were held and have been placed to their workers."""
    ready = []
    for ts in tasks:
        waiting_on = ts.waiting_on or set()
        waiting_on.discard(cast(TaskState, HELD))
        if ts.state == "no-worker" or (ts.state == "waiting" and not waiting_on):
            ready.append(ts)
    # `transitions` takes the last one first, and a worker starts what comes first.
    ready.sort(key=lambda ts: ts.priority, reverse=True)
    scheduler.transitions({ts.key: "processing" for ts in ready}, stimulus_id="distmm-open")


def stranded(scheduler: Scheduler) -> list[TaskState]:
    """Tasks without a worker that may run on any, and whose own worker has gone or does not run.

    Dask sends them elsewhere when they become ready. If no worker runs then, they become "no-worker"; and when a worker
    joins, Dask looks only at those of them whose restrictions name it. Without this they would wait for ever.
    """
    return [ts for ts in scheduler.unrunnable if ts.loose_restrictions and not scheduler.valid_workers(ts)]


def to_run(scheduler: Scheduler, keys: Iterable[object]) -> set[object]:
    """Keys of the tasks that a new graph will run: all that `keys` need and that are not in memory or under way."""
    found: set[object] = set()
    stack = [scheduler.tasks[key] for key in keys if key in scheduler.tasks]
    while stack:
        ts = stack.pop()
        if ts.state == "released" and ts.key not in found:
            found.add(ts.key)
            stack.extend(ts.dependencies)
    return found


def makers(ts: TaskState, new: set[object]) -> Iterator[TaskState]:
    """Yield the task that makes a block, and the tasks that it needs and no other task needs.

    Tasks that have run, and those that the user or an earlier product has placed, are left out.
    """
    while ts.key in new and not ts.worker_restrictions:
        yield ts
        if len(ts.dependencies) != 1:
            return
        (ts,) = ts.dependencies
        if len(ts.dependents) != 1:
            return


def copy_blocks(scheduler: Scheduler, address: str, keys: list[object]) -> None:
    """Ask a worker to fetch blocks that are in memory elsewhere: from each of their holders in the order of `keys`.

    All blocks of one message have the same priority, and a worker takes the last one of them first.
    """
    if address in scheduler.workers:
        scheduler.request_acquire_replicas(address, keys[::-1], stimulus_id="distmm-copy")


def drop_blocks(scheduler: Scheduler, address: str, keys: list[object]) -> None:
    """Ask a worker to drop its replicas of blocks, as Dask's Active Memory Manager would.

    Blocks that a running task there reads are left out: the worker would refuse to drop them, with an error.
    """
    worker = scheduler.workers.get(address)
    if worker is None:
        return
    idle = [
        key for key in keys if not any(waiter.processing_on is worker for waiter in scheduler.tasks[key].waiters or ())
    ]
    if idle:
        scheduler.request_remove_replicas(address, idle, stimulus_id="distmm-last-use")


def fail(scheduler: Scheduler, tasks: Iterable[TaskState], reason: Exception) -> None:
    """Let tasks that have not begun fail, with everything that needs them."""
    failed = {}
    for ts in tasks:
        if ts.state in ("released", "waiting", "no-worker", "queued"):
            ts.exception, ts.exception_text, ts.exception_blame = dumps(reason), repr(reason), ts
            failed[ts.key] = "erred"
    scheduler.transitions(failed, stimulus_id="distmm-failed")


class MemoryManager:
    """Dask's Active Memory Manager, paused while products run.

    Every 2 s it drops one of two replicas of a block, perhaps the one at home. The block would then travel again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.manager = scheduler.extensions.get("amm")
        self.paused = False  # by `pause`

    def pause(self) -> None:
        """Stop it, if it runs."""
        if self.manager is not None and self.manager.running:
            self.manager.stop()
            self.paused = True

    def resume(self) -> None:
        """Start it again, if it was paused here."""
        if self.paused:
            self.manager.start()
            self.paused = False

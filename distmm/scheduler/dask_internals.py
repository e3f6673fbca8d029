"""What distmm does to the tasks of Dask's scheduler through its private parts; `dask_extensions` uses its extensions.

Dask documents the attributes of `TaskState` and the states of tasks, but not that a plugin may change them. They were
seen on the versions of distributed in `VERSIONS_SEEN`. ``tests/distmm/scheduler/test_dask_internals*.py`` fail first
when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import cast

from distributed.comm import CommClosedError
from distributed.protocol.pickle import dumps
from distributed.scheduler import Scheduler, TaskState

from distmm.graph.dask_tasks import GatherTask, PlacedTask, faster, unfused

VERSIONS_SEEN = ("2026.7.1", "2026.8.0")

# A held task is restricted to this address, which no worker has. So the scheduler sends it to no worker. When the
# task's dependencies are in memory, the scheduler moves it to the state "no-worker". Users take that for an alarm, and
# `no-workers-timeout` would fail the task. `park` keeps it in "waiting": for its dependencies, and for this entry.
HELD = "distmm-held"


class Restriction(set[str]):
    """Addresses to which distmm has restricted a task; all other restrictions are the user's.

    It is strict: Dask's work stealing moves tasks whose restriction is loose. `elsewhere` widens it if no worker of
    these addresses can run the task.

    Attributes
    ----------
    ranks : tuple of int, optional
        Where the user lets the task run; None for all workers.
    """

    ranks: tuple[int, ...] | None = None


def _restrict(ts: TaskState, addresses: Iterable[str], ranks: tuple[int, ...] | None) -> None:
    ts.worker_restrictions, ts.host_restrictions, ts.loose_restrictions = Restriction(addresses), None, False
    ts.worker_restrictions.ranks = ranks


def annotate(scheduler: Scheduler, ts: TaskState, annotations: Mapping[str, object]) -> None:
    """Give a new task the annotations of its layer, which array optimisation has dropped, as Dask would."""
    if not ts.annotations and not isinstance(ts.worker_restrictions, Restriction):
        scheduler._apply_annotations([ts], {}, dict(annotations))


def restrictions(ts: TaskState) -> Hashable:
    """Return what the user asks for the place of a task; None for nothing."""
    workers, hosts, resources = ts.worker_restrictions, ts.host_restrictions, ts.resource_restrictions
    if isinstance(workers, Restriction) or not (workers or hosts or resources):
        return None
    asked = workers or (), hosts or (), (resources or {}).items()
    return (*map(frozenset, asked), ts.loose_restrictions)


def described(ts: TaskState) -> str:
    """Return what the user asks for the place of a task, as he has written it."""
    workers = sorted((ts.worker_restrictions or set()) | (ts.host_restrictions or set()))
    asked = {"workers": workers, "resources": ts.resource_restrictions}
    return ", ".join(f"{name}={value}" for name, value in asked.items() if value)


def allowed(scheduler: Scheduler, ts: TaskState) -> set[str] | None:
    """Addresses of the workers on which the user lets a task run, also if they are paused; None for all."""
    found = None
    if ts.worker_restrictions or ts.host_restrictions:
        named, hosts = ts.worker_restrictions or (), set(map(scheduler.coerce_hostname, ts.host_restrictions or ()))
        found = {address for address, ws in scheduler.workers.items() if address in named or ws.host in hosts}
    for resource, amount in (ts.resource_restrictions or {}).items():
        enough = {address for address, has in scheduler.resources.get(resource, {}).items() if has >= amount}
        found = enough if found is None else found & enough
    return None if not found and ts.loose_restrictions and not ts.resource_restrictions else found


def hold(ts: TaskState, order: int, ranks: tuple[int, ...] | None = None) -> None:
    """Keep a task from being sent to a worker."""
    _restrict(ts, {HELD}, ranks)
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


def place(ts: TaskState, address: str, order: int = 0, ranks: tuple[int, ...] | None = None) -> None:
    """Let a task run on one worker, and one that was held, too."""
    before = ts.worker_restrictions
    _restrict(ts, {address}, before.ranks if isinstance(before, Restriction) else ranks)
    _delay(ts, order)


def is_placed(ts: TaskState) -> bool:
    """Whether `place` has said where a task runs."""
    return isinstance(ts.worker_restrictions, Restriction) and not is_held(ts)


def elsewhere(scheduler: Scheduler, ts: TaskState, ranks: Sequence[str]) -> bool:
    """Let a task run on all workers that it may run on, if its own one cannot run it; return whether there is one now.

    Parameters
    ----------
    ranks : sequence of str
        Address of each rank.
    """
    if not is_placed(ts):
        return False
    if not scheduler.valid_workers(ts):
        running, restriction = {worker.address for worker in scheduler.running}, ts.worker_restrictions
        may = running if restriction.ranks is None else running & {ranks[rank] for rank in restriction.ranks}
        _restrict(ts, restriction | may, restriction.ranks)
    return bool(scheduler.valid_workers(ts))


def _delay(ts: TaskState, order: int) -> None:
    """Add to the priority of a task. Dask starts the lowest one first."""
    if order:
        first, *rest = ts.priority
        ts.priority = (first + order, *rest)


def move_tasks(scheduler: Scheduler, old: str, new: str) -> None:
    """Place the tasks of a dead worker on its replacement."""
    for ts in scheduler.tasks.values():
        if isinstance(ts.worker_restrictions, Restriction) and old in ts.worker_restrictions:
            _restrict(ts, {new}, ts.worker_restrictions.ranks)


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


def to_run(scheduler: Scheduler, keys: Iterable[object]) -> set[object]:
    """Keys of the tasks that a new graph will run: all that `keys` need and that are not in memory or under way.

    A task that needs a failed one fails without having run. Dask then does not run what only such tasks need.
    """
    found, failed = _needed(scheduler, keys, frozenset())
    failing: set[object] = set()
    while failed:
        readers = [ts for ts in failed.pop().dependents if ts.key in found and ts.key not in failing]
        failing.update(ts.key for ts in readers)
        failed.extend(readers)
    return _needed(scheduler, keys, failing)[0] if failing else found


def _needed(
    scheduler: Scheduler, keys: Iterable[object], without: Collection[object]
) -> tuple[set[object], list[TaskState]]:
    """Return the keys of the tasks without a result that `keys` need, and the failed ones among what these read."""
    found: set[object] = set()
    failed: list[TaskState] = []
    stack = [scheduler.tasks[key] for key in keys if key in scheduler.tasks]
    while stack:
        ts = stack.pop()
        if ts.state == "erred":
            failed.append(ts)
        elif ts.state == "released" and ts.key not in found and ts.key not in without:
            found.add(ts.key)
            stack.extend(ts.dependencies)
    return found, failed


def makers(ts: TaskState, new: set[object], free: Callable[[TaskState], bool]) -> Iterator[TaskState]:
    """Yield the task that makes a block, and the tasks that it needs and no other task needs.

    Tasks that have run, and those that are not `free` to run where the product runs, are left out, and what is needed
    by a task that reads several others, unless it gathers chunks.
    """
    stack = [ts]
    while stack:
        ts = stack.pop()
        if ts.key in new and free(ts):
            yield ts
            if len(ts.dependencies) == 1 or isinstance(ts.run_spec, GatherTask):
                stack += [each for each in ts.dependencies if len(each.dependents) == 1]


def prepare(tasks: Iterable[TaskState]) -> None:
    """Make product tasks of fused ones (`unfused`); give tasks that read blocks of C faster functions (`faster`)."""
    for ts in tasks:
        ts.run_spec = unfused(ts.run_spec)
    for ts in tasks:
        made = faster(ts.run_spec)
        if made is not ts.run_spec and any(isinstance(each.run_spec, PlacedTask) for each in ts.dependencies):
            ts.run_spec = made


def leave_queue(scheduler: Scheduler, tasks: Iterable[TaskState], addresses: Sequence[str]) -> None:
    """Send those of the tasks to workers that are in Dask's queue and whose results clients keep.

    The queue bounds results that do not stay. In the order of the queue, each goes to the worker with the fewest tasks.
    Later it is a task like any other: workers that join may steal it.
    """
    running = [ws for ws in map(scheduler.workers.get, addresses) if ws in scheduler.running]
    queued = sorted((ts for ts in tasks if ts.state == "queued" and ts.who_wants), key=lambda ts: ts.priority)
    for ts in queued if running else ():
        place(ts, min(running, key=lambda ws: len(ws.processing)).address)
        scheduler.transitions({ts.key: "released"}, stimulus_id="distmm-placed")  # Dask then sends it to the worker
        ts.worker_restrictions = None


def copy_blocks(scheduler: Scheduler, address: str, keys: list[object]) -> None:
    """Ask a worker to fetch blocks that are in memory elsewhere: from each of their holders in the order of `keys`.

    All blocks of one message have the same priority, and a worker takes the last one of them first.
    """
    if address in scheduler.workers:
        with suppress(CommClosedError):  # a worker that has just died, which Dask is about to remove
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
        with suppress(CommClosedError):  # as in `copy_blocks`
            scheduler.request_remove_replicas(address, idle, stimulus_id="distmm-last-use")


def fail(scheduler: Scheduler, tasks: Iterable[TaskState], reason: Exception) -> None:
    """Let tasks that have not begun fail, with everything that needs them."""
    failed = {}
    for ts in tasks:
        if ts.state in ("released", "waiting", "no-worker", "queued"):
            ts.exception, ts.exception_text, ts.exception_blame = dumps(reason), repr(reason), ts
            failed[ts.key] = "erred"
    scheduler.transitions(failed, stimulus_id="distmm-failed")


def forget_unread(scheduler: Scheduler, keys: Iterable[object]) -> None:
    """Forget the tasks of a new graph that no task reads and no client wants.

    Dask fuses the tasks of a lazy array in another way for each expression. If the scheduler knows the key of a task
    from an earlier graph, the task keeps its old dependencies. Those that only the new graph gives it are read by
    nothing, and Dask never forgets them (dask/dask issue 9888): their arrays stay, and `Client.restart` fails.
    """
    known = (scheduler.tasks.get(key) for key in keys)
    unread = [ts.key for ts in known if ts and ts.state == "released" and not ts.dependents and not ts.who_wants]
    scheduler.transitions(dict.fromkeys(unread, "forgotten"), stimulus_id="distmm-unread")


def unrestrict_operands(failed: Iterable[TaskState]) -> None:
    """Lift `workers=` and `resources=` from the tasks that none but failed tasks need.

    They stay with the scheduler as long as the failed result does, and another product may read them meanwhile.
    """
    gone = set(failed)
    stack = list(gone)
    while stack:
        for ts in stack.pop().dependencies - gone:
            if ts.state == "released" and not ts.who_wants and ts.dependents <= gone:
                ts.worker_restrictions = ts.host_restrictions = ts.resource_restrictions = None
                ts.loose_restrictions = False
                gone.add(ts)
                stack.append(ts)

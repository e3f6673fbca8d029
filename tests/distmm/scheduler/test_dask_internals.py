"""What `distmm.scheduler.dask_internals` does to tasks that it holds: these tests fail first when Dask changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import distributed
import pytest
from distributed import Client, Scheduler, SchedulerPlugin
from distributed.scheduler import TaskState
from distributed.stealing import WorkStealing

from distmm.all_workers import workers_of
from distmm.scheduler import dask_internals
from tests.distmm.scheduler.known import on_scheduler
from tests.until import until


class Holding(SchedulerPlugin):
    """Holds every task of a new graph, and notes the states of tasks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.told: list[tuple[str, str, bool]] = []

    def update_graph(self, scheduler, *, keys, **kwargs):
        for number, key in enumerate(sorted(dask_internals.to_run(scheduler, keys))):
            dask_internals.hold(scheduler.tasks[key], number)

    def transition(self, key, start, finish, *args, **kwargs):
        ts = self.scheduler.tasks[key]
        if finish == "no-worker":
            dask_internals.park(self.scheduler, ts)
        self.told.append((start, finish, bool(ts.waiters or ts.who_wants)))


@pytest.fixture
def holding(two: Client) -> Iterator[Holding]:
    scheduler = two.cluster.scheduler
    plugin = Holding(scheduler)
    scheduler.add_plugin(plugin, name="holding")
    yield plugin
    scheduler.remove_plugin("holding")


def held(client: Client, *keys: str) -> None:
    """Wait until these tasks are held with all their dependencies in memory, in a state that alarms nobody.

    Tasks of the test before may still be on their way out, so they are not counted.
    """
    scheduler = client.cluster.scheduler

    def waits(key: str) -> bool:
        ts = scheduler.tasks.get(key)
        return ts is not None and ts.state == "waiting" and ts.waiting_on == {dask_internals.HELD}

    until(lambda: all(map(waits, keys)))
    assert not scheduler.unrunnable


def start_all(scheduler: Scheduler) -> None:
    tasks = [ts for ts in scheduler.tasks.values() if dask_internals.is_held(ts)]
    for ts in tasks:
        dask_internals.place(ts, next(iter(scheduler.workers)))
    dask_internals.start(scheduler, tasks)


def test_this_version_has_been_looked_at() -> None:
    """If this fails: run all tests, read the release notes about the scheduler, and add it to `VERSIONS_SEEN`."""
    assert distributed.__version__ in dask_internals.VERSIONS_SEEN


def test_held_tasks_wait_until_they_start_where_they_are_placed_in_the_order_of_their_priorities(
    two: Client, holding: Holding
) -> None:
    futures = [two.submit(lambda x: x, n, key=f"held-{n}") for n in range(3)]
    held(two, *(f"held-{n}" for n in range(3)))
    address = sorted(workers_of(two))[1]

    def start(scheduler: Scheduler) -> None:
        tasks = [scheduler.tasks[f"held-{n}"] for n in range(3)]
        for number, ts in enumerate(tasks):
            dask_internals.place(ts, address, -number)  # the last one first
        dask_internals.start(scheduler, tasks)

    on_scheduler(two, start)
    assert [future.result(timeout=60) for future in futures] == [0, 1, 2]
    assert {worker for workers in two.who_has(futures).values() for worker in workers} == {address}
    log = two.run(lambda dask_worker: [key for key, *_ in dask_worker.state.log if isinstance(key, str)])[address]
    first = [key for key in dict.fromkeys(log) if key.startswith("held-")]
    assert first == ["held-2", "held-1", "held-0"]


def test_dasks_deadline_for_tasks_without_a_worker_leaves_held_tasks_alone(two: Client, holding: Holding) -> None:
    future = two.submit(lambda: 1, key="patient")
    held(two, "patient")

    def check(scheduler: Scheduler) -> None:
        before, scheduler.no_workers_timeout = scheduler.no_workers_timeout, 1e-9
        try:
            scheduler._check_no_workers()
        finally:
            scheduler.no_workers_timeout = before

    on_scheduler(two, check)
    assert not future.done()
    on_scheduler(two, start_all)
    assert future.result(timeout=60) == 1


def test_a_held_task_that_loses_its_dependency_stays_held_until_it_starts(two: Client, holding: Holding) -> None:
    dependency = two.submit(lambda: 1, key="dependency")
    held(two, "dependency")
    on_scheduler(two, start_all)
    dependency.result(timeout=60)
    after = two.submit(lambda x: x + 1, dependency, key="after")
    held(two, "after")

    def lose(scheduler: Scheduler) -> None:
        scheduler.remove_all_replicas(scheduler.tasks["dependency"])
        scheduler.transitions({"dependency": "released"}, "test")

    on_scheduler(two, lose)
    dependency.result(timeout=60)
    held(two, "after")
    on_scheduler(two, start_all)
    assert after.result(timeout=60) == 2


def test_a_held_task_that_is_given_up_and_wanted_again_is_held_again(two: Client, holding: Holding) -> None:
    scheduler = two.cluster.scheduler
    first = two.submit(lambda: 1, key="again")
    reader = two.submit(lambda x: x, first, key="reader")  # keeps the scheduler from forgetting the task
    until(lambda: "reader" in scheduler.tasks)  # later it would be held for ever
    held(two, "again")

    def release(scheduler: Scheduler) -> None:
        scheduler.transitions({"again": "released"}, "test")

    on_scheduler(two, release)  # it is wanted, so the scheduler makes it wait again at once
    held(two, "again")
    on_scheduler(two, start_all)
    assert reader.result(timeout=60) == 1
    del first, reader
    until(lambda: not scheduler.tasks)


def test_cancelled_held_tasks_leave_nothing(two: Client, holding: Holding) -> None:
    scheduler = two.cluster.scheduler
    futures = [two.submit(lambda x: x, n, key=f"cancelled-{n}") for n in range(3)]
    held(two, *(f"cancelled-{n}" for n in range(3)))
    two.cancel(futures)
    until(lambda: not scheduler.tasks)
    assert not scheduler.unrunnable


def test_a_scheduler_that_checks_itself_keeps_held_tasks_where_it_expects_them(two: Client, holding: Holding) -> None:
    scheduler = two.cluster.scheduler
    scheduler.validate = True
    try:
        future = two.submit(lambda: 1, key="checked")
        until(lambda: "checked" in scheduler.tasks and scheduler.tasks["checked"].state == "no-worker")
        on_scheduler(two, start_all)
        assert future.result(timeout=60) == 1
        scheduler.validate_state()
    finally:
        scheduler.validate = False


def test_tasks_of_a_dead_worker_move_to_its_replacement(two: Client, holding: Holding) -> None:
    future = two.submit(lambda: 1, key="moved")
    held(two, "moved")
    address = next(iter(workers_of(two)))

    def move(scheduler: Scheduler) -> None:
        dask_internals.move_tasks(scheduler, dask_internals.HELD, address)
        scheduler.tasks["moved"].loose_restrictions = True
        dask_internals.start(scheduler, [scheduler.tasks["moved"]])

    on_scheduler(two, move)
    assert future.result(timeout=60) == 1
    assert list(two.who_has(future).values()) == [[address]]


def test_held_tasks_fail_with_a_reason_and_all_that_need_them(two: Client, holding: Holding) -> None:
    one = two.submit(lambda: 1, key="fails")
    after = two.submit(lambda x: x, one, key="fails-too")
    held(two, "fails")

    def fail(scheduler: Scheduler) -> None:
        dask_internals.fail(scheduler, [scheduler.tasks["fails"]], RuntimeError("no such luck"))

    on_scheduler(two, fail)
    for future in (one, after):
        with pytest.raises(RuntimeError, match="no such luck"):
            future.result(timeout=60)


def test_a_result_that_is_let_go_has_no_waiters_and_one_that_is_lost_has(two: Client, holding: Holding) -> None:
    scheduler = two.cluster.scheduler
    future = two.submit(lambda: 1, key="let-go")
    held(two, "let-go")
    on_scheduler(two, start_all)
    future.result(timeout=60)

    def lose(scheduler: Scheduler) -> None:
        scheduler.remove_all_replicas(scheduler.tasks["let-go"])
        scheduler.transitions({"let-go": "released"}, "test")

    on_scheduler(two, lose)
    until(lambda: scheduler.tasks["let-go"].state in ("memory", "processing", "waiting"))
    assert ("memory", "released", True) in holding.told
    future.result(timeout=60)
    holding.told.clear()
    del future
    until(lambda: "let-go" not in scheduler.tasks)
    assert {("memory", "released", False), ("memory", "forgotten", False)} & set(holding.told)


def test_makers_are_the_tasks_that_serve_one_block_alone(two: Client, holding: Holding) -> None:
    raw = two.submit(lambda: 1, key="raw")
    block = two.submit(lambda x: x, raw, key="block")
    until(lambda: "block" in two.cluster.scheduler.tasks)
    held(two, "raw")

    def look(dask_scheduler: Scheduler) -> list[list[str]]:
        block, new = dask_scheduler.tasks["block"], {"raw", "block"}
        free: list[Callable[[TaskState], bool]] = [lambda ts: True, lambda ts: ts.key != "raw"]
        return [[ts.key for ts in dask_internals.makers(block, new, where)] for where in free]

    assert two.run_on_scheduler(look) == [["block", "raw"], ["block"]]
    two.cancel([raw, block])


def test_placed_tasks_are_not_stolen(two: Client, holding: Holding) -> None:
    future = two.submit(lambda: 1, key="stays")
    held(two, "stays")
    first, second = sorted(workers_of(two))

    def thief(dask_scheduler: Scheduler) -> object:
        ts, other = dask_scheduler.tasks["stays"], dask_scheduler.workers[second]
        dask_internals.place(ts, first)
        return WorkStealing._get_thief(None, dask_scheduler, ts, {other}, occupancies={other: 0.0})

    assert two.run_on_scheduler(thief) is None
    on_scheduler(two, lambda scheduler: dask_internals.start(scheduler, [scheduler.tasks["stays"]]))
    assert future.result(timeout=60) == 1


@pytest.mark.parametrize("ranks", [None, (1,)])
def test_placed_tasks_of_a_worker_that_has_gone_run_where_they_may(
    two: Client, holding: Holding, ranks: tuple[int, ...] | None
) -> None:
    future = two.submit(lambda: 1, key=f"homeless-{ranks}")
    held(two, future.key)
    addresses = sorted(workers_of(two))

    def start(scheduler: Scheduler) -> None:
        ts = scheduler.tasks[future.key]
        dask_internals.hold(ts, 0, ranks)
        dask_internals.place(ts, "tcp://gone:1")
        dask_internals.start(scheduler, [ts])
        assert ts.state == "no-worker"
        assert dask_internals.elsewhere(scheduler, ts, addresses)
        dask_internals.start(scheduler, [ts])

    on_scheduler(two, start)
    assert future.result(timeout=60) == 1
    (address,) = two.who_has(future)[future.key]
    assert address in [addresses[rank] for rank in ranks or (0, 1)]

"""What `distmm.scheduler.dask_internals` does to a real scheduler: these tests fail first when Dask changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import dask
import distributed
import pytest
from distributed import Client, Event, LocalCluster, Scheduler, SchedulerPlugin
from distributed.comm import CommClosedError
from distributed.scheduler import TaskState
from distributed.stealing import WorkStealing

from distmm.all_workers import workers_of
from distmm.scheduler import dask_extensions, dask_internals
from tests.until import until


@pytest.fixture(scope="module")
def two() -> Iterator[Client]:
    """Two workers and their scheduler in this process."""
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def no_amm(two: Client) -> Iterator[None]:
    """Copies stay: every two seconds, Dask's memory manager would remove those that nobody waits for."""
    two.amm.stop()
    yield
    two.amm.start()


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


def on_scheduler(client: Client, function) -> None:
    """Run where the scheduler runs, which is no place for two threads."""
    client.run_on_scheduler(lambda dask_scheduler: function(dask_scheduler))


def held(client: Client, number: int) -> None:
    """Wait until so many tasks are held with all their dependencies in memory, in a state that alarms nobody."""
    scheduler = client.cluster.scheduler

    def parked() -> list[str]:
        return [ts.state for ts in list(scheduler.tasks.values()) if ts.waiting_on == {dask_internals.HELD}]

    until(lambda: parked() == ["waiting"] * number)
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
    held(two, 3)
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
    held(two, 1)

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
    held(two, 1)
    on_scheduler(two, start_all)
    dependency.result(timeout=60)
    after = two.submit(lambda x: x + 1, dependency, key="after")
    held(two, 1)

    def lose(scheduler: Scheduler) -> None:
        scheduler.remove_all_replicas(scheduler.tasks["dependency"])
        scheduler.transitions({"dependency": "released"}, "test")

    on_scheduler(two, lose)
    dependency.result(timeout=60)
    held(two, 1)
    on_scheduler(two, start_all)
    assert after.result(timeout=60) == 2


def test_a_held_task_that_is_given_up_and_wanted_again_is_held_again(two: Client, holding: Holding) -> None:
    scheduler = two.cluster.scheduler
    first = two.submit(lambda: 1, key="again")
    reader = two.submit(lambda x: x, first, key="reader")  # keeps the scheduler from forgetting the task
    until(lambda: "reader" in scheduler.tasks)  # later it would be held for ever
    held(two, 1)

    def release(scheduler: Scheduler) -> None:
        scheduler.transitions({"again": "released"}, "test")

    on_scheduler(two, release)  # it is wanted, so the scheduler makes it wait again at once
    held(two, 1)
    on_scheduler(two, start_all)
    assert reader.result(timeout=60) == 1
    del first, reader
    until(lambda: not scheduler.tasks)


def test_cancelled_held_tasks_leave_nothing(two: Client, holding: Holding) -> None:
    scheduler = two.cluster.scheduler
    futures = [two.submit(lambda x: x, n, key=f"cancelled-{n}") for n in range(3)]
    held(two, 3)
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
    held(two, 1)
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
    held(two, 1)

    def fail(scheduler: Scheduler) -> None:
        dask_internals.fail(scheduler, [scheduler.tasks["fails"]], RuntimeError("no such luck"))

    on_scheduler(two, fail)
    for future in (one, after):
        with pytest.raises(RuntimeError, match="no such luck"):
            future.result(timeout=60)


@pytest.mark.usefixtures("no_amm")
def test_blocks_are_copied_and_dropped(two: Client) -> None:
    first, second = sorted(workers_of(two))
    future = two.submit(lambda: 1, key="copied", workers=[first])
    future.result(timeout=60)
    on_scheduler(two, lambda scheduler: dask_internals.copy_blocks(scheduler, second, ["copied"]))
    until(lambda: len(two.who_has(future)["copied"]) == 2)
    on_scheduler(two, lambda scheduler: dask_internals.copy_blocks(scheduler, "tcp://nobody:1", ["copied"]))
    on_scheduler(two, lambda scheduler: dask_internals.drop_blocks(scheduler, second, ["copied"]))
    until(lambda: two.who_has(future)["copied"] == [first])


def test_a_worker_whose_connection_is_closed_gets_no_messages_until_dask_removes_it() -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        first, second = sorted(workers_of(client))
        future = client.submit(lambda: 1, key="copied", workers=[first])
        future.result(timeout=60)
        client.replicate(future)

        def die(scheduler: Scheduler) -> None:
            stream = scheduler.stream_comms[second]
            stream.comm.abort()
            with pytest.raises(CommClosedError):
                stream.send({})
            dask_internals.copy_blocks(scheduler, second, ["copied"])
            dask_internals.drop_blocks(scheduler, second, ["copied"])

        on_scheduler(client, die)
        until(lambda: second not in cluster.scheduler.workers)


@pytest.mark.usefixtures("no_amm")
def test_a_worker_fetches_blocks_in_the_order_in_which_they_are_asked_for(two: Client) -> None:
    first, second = sorted(workers_of(two))
    names = [f"fetched-{i}" for i in (3, 0, 2, 5, 1, 4)]
    blocks = [two.submit(bytes, 100, key=name, workers=[first]) for name in names]
    two.gather(blocks)
    (worker,) = (each for each in two.cluster.workers.values() if each.address == second)
    before, worker.state.transfer_message_bytes_limit = worker.state.transfer_message_bytes_limit, 1  # one block each
    try:
        on_scheduler(two, lambda scheduler: dask_internals.copy_blocks(scheduler, second, names))
        until(lambda: all(len(two.who_has(block)[block.key]) == 2 for block in blocks))
    finally:
        worker.state.transfer_message_bytes_limit = before
    fetched = [key for log in worker.transfer_incoming_log for key in log["keys"] if key in names]
    assert fetched == names


def test_a_result_that_is_let_go_has_no_waiters_and_one_that_is_lost_has(two: Client, holding: Holding) -> None:
    scheduler = two.cluster.scheduler
    future = two.submit(lambda: 1, key="let-go")
    held(two, 1)
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
    held(two, 1)

    def look(dask_scheduler: Scheduler) -> list[list[str]]:
        block, new = dask_scheduler.tasks["block"], {"raw", "block"}
        free: list[Callable[[TaskState], bool]] = [lambda ts: True, lambda ts: ts.key != "raw"]
        return [[ts.key for ts in dask_internals.makers(block, new, where)] for where in free]

    assert two.run_on_scheduler(look) == [["block", "raw"], ["block"]]
    two.cancel([raw, block])


def test_tasks_leave_the_queue_for_the_worker_with_the_fewest_if_a_client_keeps_them(two: Client) -> None:
    scheduler, begin = two.cluster.scheduler, Event("begin", client=two)
    kept = two.get({("kept", n): (waited, n) for n in range(9)}, [("kept", n) for n in range(9)], sync=False)
    passing = {("passing", n): (waited, n) for n in range(9)}
    total = two.get({**passing, "total": (sum, list(passing))}, "total", sync=False)
    until(lambda: sum(ts.state == "queued" for ts in list(scheduler.tasks.values())) == 14)

    def leave(scheduler: Scheduler) -> None:
        dask_internals.leave_queue(scheduler, list(scheduler.tasks.values()), list(scheduler.workers))

    on_scheduler(two, leave)
    assert {scheduler.tasks[future.key].state for future in kept} == {"processing"}
    placed = Counter(scheduler.tasks[future.key].processing_on for future in kept)
    assert sorted(placed.values()) == [4, 5]
    assert not any(scheduler.tasks[future.key].worker_restrictions for future in kept)  # workers that join may steal
    assert sum(ts.state == "queued" for ts in scheduler.tasks.values()) == 9
    begin.set()
    assert total.result(60) + sum(two.gather(kept)) == 72


def test_tasks_do_not_leave_the_queue_for_workers_that_are_paused(two: Client) -> None:
    scheduler, begin = two.cluster.scheduler, Event("begin", client=two)
    begin.clear()  # another test has set it
    futures = two.get({("own", n): (waited, n) for n in range(9)}, [("own", n) for n in range(9)], sync=False)
    until(lambda: sum(ts.state == "queued" for ts in list(scheduler.tasks.values())) == 5)

    def leave(dask_scheduler: Scheduler) -> list[list[int]]:
        workers, loads = list(dask_scheduler.workers.values()), []
        for paused in (workers, workers[:1]):
            dask_scheduler.running.difference_update(paused)
            addresses = list(dask_scheduler.workers)
            dask_internals.leave_queue(dask_scheduler, list(dask_scheduler.tasks.values()), addresses)
            dask_scheduler.running.update(paused)
            loads.append([len(worker.processing) for worker in workers])
        return loads

    assert two.run_on_scheduler(leave) == [[2, 2], [2, 7]]
    begin.set()
    assert sum(two.gather(futures)) == 36


def waited(number: int) -> int:
    Event("begin").wait(60)
    return number


def test_the_memory_manager_pauses_and_goes_on(two: Client) -> None:
    def look(dask_scheduler: Scheduler) -> list[bool]:
        paused = dask_extensions.MemoryManager(dask_scheduler)
        assert paused.manager is not None
        states = [paused.manager.running]
        for busy in (True, True, False, False):
            paused.pause(busy)
            states.append(paused.manager.running)
        return states

    assert two.run_on_scheduler(look) == [True, False, False, True, True]


def test_placed_tasks_are_not_stolen(two: Client, holding: Holding) -> None:
    future = two.submit(lambda: 1, key="stays")
    held(two, 1)
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
    held(two, 1)
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

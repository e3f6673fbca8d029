"""What `distmm.scheduler.dask_internals` does to workers and to the queue: these tests fail first when Dask changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from distributed import Client, Event, LocalCluster, Scheduler
from distributed.comm import CommClosedError

from distmm.all_workers import workers_of
from distmm.scheduler import dask_extensions, dask_internals
from tests.distmm.scheduler.known import on_scheduler
from tests.until import until


@pytest.fixture
def no_amm(two: Client) -> Iterator[None]:
    """Copies stay: every two seconds, Dask's memory manager would remove those that nobody waits for."""
    two.amm.stop()
    yield
    two.amm.start()


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

"""Private parts of Dask's worker: this version has them, and a change that fails does not fail products."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import dask
import distributed
import distributed.metrics
import distributed.utils
import numpy as np
import pytest
from distributed import Client, LocalCluster, Scheduler, Worker, get_worker, wait

import distmm
from distmm.transfer import serialization
from distmm.worker import dask_internals, neighbours, plugin


def test_the_installed_version_of_dask_is_one_that_was_seen() -> None:
    assert distributed.__version__.startswith(dask_internals.VERSIONS_SEEN), (
        "compare each function of distmm/worker/dask_internals.py with this distributed, then add it to VERSIONS_SEEN"
    )


def test_a_thread_knows_whether_it_runs_a_task(client: Client) -> None:
    assert client.submit(dask_internals.in_task, pure=False).result()
    assert not any(client.run(dask_internals.in_task).values())
    assert not dask_internals.in_task()


def test_a_client_has_the_number_of_the_process_that_made_it(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dask_internals.made_here(client)
    assert client.submit(lambda: dask_internals.made_here(distributed.get_client()), pure=False).result()
    other = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: other)
    assert not dask_internals.made_here(client)


def test_a_task_that_secedes_is_not_metered() -> None:
    measured: list[str] = []
    meter = distributed.metrics.context_meter
    with meter.add_callback(lambda label, value, unit: measured.append(label)):
        with dask_internals.without_task_meters():
            meter.digest_metric("inside", 1, "")
        meter.digest_metric("outside", 1, "")
    assert measured == ["outside"]


def test_a_worker_tells_which_plugins_it_will_set_up() -> None:
    async def start() -> list[object]:
        class Looking(distributed.WorkerPlugin):
            name = "looking"

        given = Looking()
        async with distributed.Scheduler(port=0, dashboard_address=":0") as scheduler:
            worker = Worker(scheduler.address, plugins=(given,), dashboard_address=":0")
            found = list(dask_internals.pending_plugins(worker))
            assert found == [given]
            async with worker:
                return list(dask_internals.pending_plugins(worker))

    assert asyncio.run(start()) == []


def name_of(dask_worker: Worker) -> Any:
    return dask_worker.name


def intervals(process: Any) -> set[float]:
    streams: list[Any] = [getattr(process, name, None) for name in ("batched_stream", "scheduler_comm")]
    streams += [*getattr(process, "stream_comms", {}).values(), *getattr(process, "client_comms", {}).values()]
    return {stream.interval for stream in streams if stream is not None}


def intervals_of_worker(dask_worker: Worker) -> set[float]:
    return intervals(dask_worker)


def intervals_of_scheduler(dask_scheduler: Scheduler) -> set[float]:
    return intervals(dask_scheduler)


def test_no_process_of_a_cluster_waits_long_between_messages() -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        before = intervals(client) | client.run_on_scheduler(intervals_of_scheduler)
        assert min(before.union(*client.run(intervals_of_worker).values())) > dask_internals.MESSAGE_SECONDS
        distmm.matmul(np.eye(4), np.eye(4), client=client).compute(scheduler=client.get)
        expected = {dask_internals.MESSAGE_SECONDS}
        assert intervals(client) == client.run_on_scheduler(intervals_of_scheduler) == expected
        assert list(client.run(intervals_of_worker).values()) == [expected]


class Told:
    """Tells in the process that receives it whether it was noted when it was sent."""

    def __init__(self, nbytes: int) -> None:
        self.filling = b"." * nbytes

    def __reduce__(self) -> Any:
        return tuple, ([id(self) in serialization._by_host.get(), self.filling],)


def note(taker: str, dask_worker: Worker) -> None:
    async def where(address: str | None) -> dask_internals.Way | None:
        return neighbours._through_host if address == taker else None

    dask_internals.send_blocks_by(dask_worker, where, lambda address: None)


@pytest.mark.parametrize("near", [True, False])
def test_a_worker_asks_one_of_its_host_for_blocks_together(near: bool) -> None:
    asked: list[list[str]] = []

    async def answer(comm: Any, keys: list[str], **how: Any) -> Any:
        asked.append(keys)
        return await answers(comm, keys=keys, **how)

    how: Any = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**how) as cluster, Client(cluster) as client:
        source, target = cluster.workers[0], cluster.workers[1]
        for _ in range(2):  # a plugin may be set up again
            dask_internals.fetch_together(target, 1 << 30, lambda address: near and address == source.address)
        answers, source.handlers["get_data"] = source.handlers["get_data"], answer
        blocks = [client.submit(np.ones, 1 << 22, workers=[source.address], pure=False) for _ in range(4)]
        wait(blocks)
        assert client.submit(len, blocks, workers=[target.address]).result() == 4
    assert [len(keys) for keys in asked] == ([4] if near else [1] * 4)  # 34 MB each; Dask asks for 50 MB at a time


def test_a_workers_event_loop_gets_the_interpreters_lock_soon() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.01)
        dask_internals.answer_soon()
        assert sys.getswitchinterval() == pytest.approx(dask_internals.SWITCH_SECONDS, rel=0.05)
        sys.setswitchinterval(0.0001)
        dask_internals.answer_soon()
        assert sys.getswitchinterval() == pytest.approx(0.0001, rel=0.05)  # a shorter one stays
    finally:
        sys.setswitchinterval(before)


def test_another_object_is_sent_in_place_of_the_blocks_of_a_message() -> None:
    def doubled(blocks: dict[Any, Any]) -> tuple[object, AbstractContextManager[None]]:
        return {key: 2 * block for key, block in blocks.items()}, nullcontext()

    async def where(address: str | None) -> dask_internals.Way | None:
        return doubled

    how: Any = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "protocol": "tcp"}
    with LocalCluster(**how, dashboard_address=":0") as cluster, Client(cluster, set_as_default=False) as client:
        giver, taker = cluster.workers[0], cluster.workers[1]
        dask_internals.send_blocks_by(giver, where, lambda address: None)
        blocks = [client.submit(int, n, workers=[giver.address], pure=False) for n in (1, 2)]
        assert client.submit(sum, blocks, workers=[taker.address], pure=False).result(60) == 6


@pytest.mark.parametrize("nbytes", [0, 20_000_000])  # of a large message, a thread makes the frames
def test_blocks_are_noted_while_they_are_sent_to_some_workers(nbytes: int) -> None:
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        giver, taker, other = client.scheduler_info()["workers"]
        client.run(note, taker)
        for to in (taker, other, taker):  # the last time, Dask uses the same connection
            block = client.submit(Told, nbytes, workers=[giver], pure=False)
            noted, filling = client.submit(tuple, block, workers=[to], pure=False).result()
            assert (noted, len(filling)) == (to == taker, nbytes)
        assert client.submit(Told, nbytes, workers=[giver], pure=False).result()[0] is False  # for the client
        reply = client.submit(ask_one, giver, workers=[taker], pure=False).result()
        assert reply["result"] == client.run(name_of, workers=[giver])[giver]


class Fragile(Told):
    """Cannot be received if it was noted when it was sent."""

    def __reduce__(self) -> Any:
        return (end_of_file, ()) if id(self) in serialization._by_host.get() else (len, (self.filling,))


def end_of_file() -> None:
    raise EOFError("the memory was freed")


def test_a_worker_learns_that_another_one_could_not_read_its_blocks_and_sends_others() -> None:
    broken: list[str | None] = []

    async def where(address: str | None) -> dask_internals.Way | None:
        return None if address in broken else neighbours._through_host

    how: Any = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "protocol": "tcp"}
    with LocalCluster(**how, dashboard_address=":0") as cluster, Client(cluster, set_as_default=False) as client:
        giver, taker = cluster.workers[0], cluster.workers[1]
        dask_internals.send_blocks_by(giver, where, broken.append)
        block = client.submit(Fragile, 5, workers=[giver.address], pure=False)
        assert client.submit(int, block, workers=[taker.address], pure=False).result(60) == 5
    assert broken == [taker.address]


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("kind", [Told, Fragile])
def test_a_client_gets_results_from_workers_of_its_host_itself(kind: type[Told], wanted: bool) -> None:
    failed: list[str] = []
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        near, far = client.scheduler_info()["workers"]
        client.run(note, "me")
        dask_internals.gather_from(client, lambda: wanted, lambda address: address == near, "me", failed.extend)
        for _ in range(2):  # the second time after a connection that was closed
            blocks = [client.submit(kind, size, workers=[at], pure=False) for at, size in ((near, 9), (far, 8))]
            found = client.gather(blocks)
            assert found == ([9, 8] if kind is Fragile else [(wanted, b"." * 9), (False, b"." * 8)])
        with pytest.raises(ZeroDivisionError):
            client.submit(divmod, 1, 0, pure=False).result()
    assert failed == ([near] * 2 if kind is Fragile and wanted else [])


@pytest.mark.parametrize("moved", [False, True])
def test_a_result_comes_by_the_scheduler_if_its_worker_has_died_or_it_has_moved(moved: bool) -> None:
    gone, failed = "tcp://127.0.0.1:9", list[str]()

    with (
        dask.config.set({"distributed.comm.timeouts.connect": "500ms"}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=":0") as own,
        Client(own, set_as_default=False) as client,
    ):
        holder, other = client.scheduler_info()["workers"]

        async def before(keys: list[Any]) -> dict[Any, list[str]]:
            return {key: [other if moved else gone] for key in keys}

        dask_internals.gather_from(client, lambda: True, lambda _: True, "me", failed.extend)
        client.scheduler.who_has = before
        assert client.submit(len, "four", workers=[holder]).result() == 4
    assert failed == ([] if moved else [gone])  # a worker that lives is asked again


def test_a_client_calls_a_function_every_second_until_it_is_closed() -> None:
    calls: list[float] = []

    def call() -> None:
        calls.append(time.monotonic())

    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        dask_internals.call_every_second(client, call)
        while len(calls) < 2:
            time.sleep(0.05)
        callback = client._periodic_callbacks["call"]
    assert not callback.is_running()


def ask_one(address: str) -> Any:
    worker = get_worker()

    async def ask() -> dict[str, Any]:
        return await dask_internals.run_on_worker(worker, address, name_of)

    return asyncio.run_coroutine_threadsafe(ask(), worker.loop.asyncio_loop).result(60)


def test_changes_to_a_worker_that_fail_do_not_fail_products(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def changed(worker: Worker) -> None:
        raise AttributeError("Dask has changed")

    monkeypatch.setattr(plugin, "profile_without_collecting", changed)
    a, b = np.random.default_rng(1).integers(-9, 9, (2, 40, 40)).astype("f8")
    with (
        caplog.at_level(logging.WARNING),
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        np.testing.assert_array_equal(distmm.matmul(a, b, client=client).compute(scheduler=client.get), a @ b)
    assert "a change to this worker has failed: Dask's profiler may stop this worker on Python 3.11" in caplog.text

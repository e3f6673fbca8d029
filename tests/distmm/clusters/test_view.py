"""What a client knows of its cluster is asked for once, until something changes, and never waited for without end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster, Scheduler, Worker, core

import distmm
from distmm.clusters import cluster, view
from distmm.clusters.cluster import describe
from distmm.errors import InputError
from distmm.product import request
from distmm.scheduler import worker_answers
from distmm.scheduler.plugin import PlacementPlugin
from distmm.transfer import lending
from distmm.transfer.loan_readers import LoanReaders
from distmm.transfer.loans import TOPIC
from tests import forked
from tests.replaced_scheduler import replaceable
from tests.until import until

N = 400  # float64 matrices of this size are read from the client's memory


@pytest.mark.parametrize("others", [True, False])
def test_workers_that_come_while_all_others_leave_are_asked_too(monkeypatch: pytest.MonkeyPatch, others: bool) -> None:
    asked: list[list[str]] = []
    real = worker_answers.ask_workers

    async def leave(scheduler: Scheduler, *question: Any) -> Any:
        asked.append(there := list(scheduler.workers))
        if len(asked) > 1:
            return await real(scheduler, *question)
        if others:
            new.append(await Worker(scheduler.address, nthreads=1))
        await scheduler.retire_workers(there)
        return {}, {}

    monkeypatch.setattr(worker_answers, "ask_workers", leave)
    new: list[Worker] = []
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as own, Client(own) as client:
        if others:
            assert describe(client, np.dtype("f4")).workers == 1
            client.sync(new[0].close)
        else:
            with pytest.raises(InputError, match="the cluster has no workers"):
                describe(client, np.dtype("f4"))
    assert asked[1] == [worker.address for worker in new]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests of the client to the scheduler, those of Dask's own callbacks left out."""
    sent: list[str] = []
    real = core.send_recv

    async def noted(comm: Any, *, op: str, **message: Any) -> Any:
        if op not in ("set_metadata", "identity"):
            sent.append(op)
        return await real(comm, op=op, **message)

    monkeypatch.setattr(core, "send_recv", noted)
    monkeypatch.setattr(view, "FRESH_SECONDS", 1000.0)
    return sent


def lazy(client: Client) -> list[Any]:
    a, b = np.random.default_rng(0).random((2, N, N))
    return [
        distmm.matmul(a, b, client=client),
        distmm.gram(a, client=client),
        distmm.gemm(2, a, b, 3, a, client=client),
        distmm.topk(a, b, 3, client=client),
        distmm.nearest(a, b, 3, "cosine", client=client),
    ]


def test_lazy_calls_send_nothing_while_nothing_changes_and_one_message_afterwards(
    client: Client, messages: list[str]
) -> None:
    lazy(client)
    messages.clear()
    lazy(client)
    assert messages == []
    before = view._views[client].changes
    future = client.submit(abs, -1, pure=False)
    assert future.result() == 1
    until(lambda: view._views[client].changes > before)
    messages.clear()
    lazy(client)
    assert messages == ["run_function"]
    del future  # not earlier: its release is another change


async def tasks_of(prefix: str, dask_scheduler: Scheduler) -> int:
    return sum(str(key).startswith(prefix) for key in dask_scheduler.tasks)


def test_the_scheduler_is_asked_on_a_machine_that_has_just_started(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: 3.0))  # seconds since its start
    assert view.on_scheduler(client, tasks_of, "no such task") == 0


@pytest.mark.usefixtures("messages")
def test_an_answer_of_the_scheduler_is_forgotten_at_each_change(client: Client) -> None:
    lazy(client)
    kept = []
    for number in range(3):  # no worker is asked meanwhile
        assert view.on_scheduler(client, tasks_of, "counted") == number
        changes = view._views[client].changes
        kept.append(client.submit(abs, -1, key=f"counted-{number}", pure=False))
        until(lambda changes=changes: view._views[client].changes > changes)
        kept[-1].result()


def test_a_worker_that_joins_or_dies_is_seen_by_the_next_call() -> None:
    with (
        forked.workers(),
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        a = np.ones((8, 8))
        assert distmm.plan(a, a, client=client).cluster.workers == 1
        cluster.scale(2)
        client.wait_for_workers(2)
        until(lambda: distmm.plan(a, a, client=client).cluster.workers == 2)
        cluster.scale(1)
        until(lambda: distmm.plan(a, a, client=client).cluster.workers == 1)


@pytest.fixture
def stopped(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Stop a worker of the cluster until the test has ended; the scheduler waits for it for a short time."""
    monkeypatch.setattr(view, "ANSWER_SECONDS", 0.5)
    pid = next(iter(client.run(os.getpid).values()))
    yield lambda: os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    until(lambda: len(client.run(os.getpid)) == len(client.scheduler_info(n_workers=-1)["workers"]))


def test_a_stopped_worker_holds_no_lazy_call_up(client: Client, stopped: Callable[[], None]) -> None:
    a, b = np.random.default_rng(0).integers(-9, 9, (2, N, N)).astype("f8")
    known = distmm.plan(a, b, client=client)
    stopped()
    view.forget(client)
    assert distmm.plan(a, b, client=client).cluster.workers == known.cluster.workers  # what it said last counts
    C = distmm.plan(a.astype("u2"), b.astype("u2"), client=client)
    assert C.cluster.workers == known.cluster.workers - 1  # it has never said how fast it multiplies uint16


def _nothing_said(dask_scheduler: Scheduler) -> None:
    dask_scheduler.plugins[PlacementPlugin.name].said.clear()


def test_workers_that_have_never_answered_are_an_error(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    a = np.ones((8, 8), "c8")
    distmm.plan(a, a, client=client)
    client.run_on_scheduler(_nothing_said)
    view.forget(client)
    monkeypatch.setattr(view, "ANSWER_SECONDS", 0.0)
    with pytest.raises(InputError, match=r"none of the 4 workers.*has answered"):
        distmm.plan(a, a, client=client)


def test_a_scheduler_that_does_not_answer_is_an_error(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy(client)
    monkeypatch.setattr(view, "SCHEDULER_SECONDS", 0.0)
    view.forget(client)
    with pytest.raises(InputError, match="has not answered for 0 s"):
        lazy(client)


def test_a_large_product_asks_workers_again_after_a_task(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = worker_answers.send

    async def noted(scheduler: Scheduler, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        sent.append(message["op"])
        return await send(scheduler, message, seconds)

    monkeypatch.setattr(worker_answers, "send", noted)
    a = np.ones((N, N))
    view.forget(client)
    distmm.plan(a, a, client=client)
    changes = view._views[client].changes
    task = client.submit(bytes, 10_000_000, pure=False)
    task.result()
    until(lambda: view._views[client].changes > changes)
    sent.clear()
    distmm.plan(a, a, client=client)
    assert sent == []  # a small one
    monkeypatch.setattr(request, "SMALL_SHARE", 0.0)
    distmm.plan(a, a, client=client)
    assert sent


def test_this_process_is_asked_once_a_second_but_for_each_large_product(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked, real = [5.5], [], psutil.virtual_memory
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: asked.append(now[0]) or real())
    cluster._this_process.cache_clear()
    a = np.ones((4, 4))
    with dask.config.set(scheduler="threads"):  # no client
        for seconds in (0, 0.25, 1):
            now[0] += seconds
            distmm.plan(a, a)
        monkeypatch.setattr(request, "SMALL_SHARE", 0.0)
        now[0] += 0.25
        distmm.plan(a, a)
    cluster._this_process.cache_clear()
    assert asked == [5.5, 6.75, 7.0]


def test_a_scheduler_at_the_address_of_a_lost_one_gets_the_plugins() -> None:
    with replaceable() as (client, first, replace):
        view.ask(client)
        assert PlacementPlugin.name in first.plugins
        second = replace()
        view.ask(client)
        assert PlacementPlugin.name in second.plugins


def test_gpus_of_workers_of_a_lost_scheduler_say_nothing_of_those_of_others() -> None:
    with replaceable() as (client, _, replace):
        view.ask(client)
        lending._tried[client][0] = True  # all workers reach the memory of GPU 0
        replace()
        view.ask(client)
        assert 0 not in lending._tried[client]


def test_clients_that_have_just_died_are_told_nothing(
    cluster: Callable[[int], Client], caplog: pytest.LogCaptureFixture
) -> None:
    async def die(client: str, dask_scheduler: Scheduler) -> None:
        dask_scheduler.client_comms[client].comm.abort()
        plugins = dask_scheduler.plugins
        plugins[PlacementPlugin.name].changes.announce("workers")
        plugins[LoanReaders.name]._subscribed(f"{TOPIC}array 1", client)

    client = cluster(1)
    dying = Client(client.scheduler.address, set_as_default=False)
    view.ask(dying)
    client.run_on_scheduler(die, dying.id)
    with contextlib.suppress(RuntimeError):  # Dask's client may be about to connect again
        dying.close()
    assert not [record for record in caplog.records if record.levelname == "CRITICAL"]

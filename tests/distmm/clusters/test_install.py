"""What scheduler and workers need is put there by one message, whatever has become of it since the last product."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster, Worker, core
from distributed.comm import CommClosedError

from distmm import matmul
from distmm.clusters import view
from distmm.scheduler.plugin import PlacementPlugin
from distmm.telemetry.scheduler import Telemetry
from distmm.telemetry.worker import WorkerTelemetry
from distmm.worker.plugin import DevicePlugin

ON_SCHEDULER = {PlacementPlugin.name, Telemetry.name}
ON_WORKERS = {DevicePlugin.name, WorkerTelemetry.name}


@pytest.fixture
def two() -> Iterator[Client]:
    """A scheduler and two workers in this process, which have met no product."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as started,
        Client(started, set_as_default=False) as client,
    ):
        yield client


def multiply(client: Client) -> None:
    a = np.arange(64.0).reshape(8, 8)
    np.testing.assert_array_equal(matmul(a, a, blocks=(4, 4, 4), client=client).compute(scheduler=client), a @ a)


def complete(client: Client, workers: int = 2) -> bool:
    there = client.run(lambda dask_worker: set(dask_worker.plugins))
    has = client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.plugins))
    return has >= ON_SCHEDULER and len(there) == workers and all(each >= ON_WORKERS for each in there.values())


def test_a_product_sends_one_message_for_all_plugins(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "FRESH_SECONDS", math.inf)  # on a busy machine a product takes longer
    multiply(client)
    sent: list[str] = []
    real = core.send_recv

    async def noted(comm: Any, *, op: str, **message: Any) -> Any:
        sent.append(op)
        return await real(comm, op=op, **message)

    monkeypatch.setattr(core, "send_recv", noted)
    view.forget(client)  # as after some seconds
    multiply(client)
    monkeypatch.undo()
    assert [op for op in sent if op.startswith(("run_function", "register", "plugin"))] == ["run_function"], sent


def test_plugins_that_were_removed_are_there_again_when_the_cluster_is_asked_next(two: Client) -> None:
    multiply(two)
    assert complete(two)
    two.unregister_worker_plugin(DevicePlugin.name)
    for name in ON_SCHEDULER:
        two.unregister_scheduler_plugin(name)
    assert not complete(two)
    view.forget(two)  # as after some seconds
    multiply(two)
    assert complete(two)


def test_a_worker_that_joins_later_gets_its_plugins_without_a_product(two: Client) -> None:
    view.ask(two)
    two.cluster.scale(3)
    two.wait_for_workers(3)
    assert complete(two, workers=3)


def test_plugins_are_installed_also_where_a_worker_dies_at_this_moment(two: Client) -> None:
    async def lost(**_: Any) -> None:
        raise CommClosedError("Stream is closed")

    dying = min(two.cluster.workers.values(), key=lambda worker: worker.address)
    dying.handlers["plugin-add"] = lost
    view.ask(two)
    device = two.run(lambda dask_worker: DevicePlugin.name in dask_worker.plugins)
    assert device == {worker.address: worker is not dying for worker in two.cluster.workers.values()}


@pytest.mark.parametrize("kind", [ZeroDivisionError, PermissionError])
def test_a_plugin_that_a_worker_cannot_start_is_an_error(
    two: Client, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def broken(self: DevicePlugin, worker: Worker) -> None:
        raise kind(worker.address)

    monkeypatch.setattr(DevicePlugin, "setup", broken)
    with pytest.raises(kind):
        view.ask(two)

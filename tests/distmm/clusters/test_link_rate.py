"""The bandwidth between workers is measured once, where a plan uses it; a failed measurement fails no product."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from distributed import Client, LocalCluster, Worker

import distmm
from distmm.clusters import cluster, measured
from distmm.product import request as plan_request
from tests import forked

EDGE = 256


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Pairs of workers of each measurement. Earlier measurements are forgotten, and every product is worth one."""
    seen: list[object] = []
    slowest = measured._slowest
    monkeypatch.setattr(measured, "_rates", type(measured._rates)())
    monkeypatch.setattr(measured, "_slowest", lambda *args: seen.append(args[-1]) or slowest(*args))
    monkeypatch.setattr(plan_request, "WORTH_MEASURING_SECONDS", 0.0)
    monkeypatch.setitem(cluster.LINKS, "cpu", math.inf)
    return seen


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    a, b = rng.integers(-9, 9, (2, EDGE, EDGE)).astype("f8")
    return a, b


def planned(client: Client, **how: object) -> distmm.Plan:
    return distmm.plan(*operands(), client=client, **{"blocks": (EDGE // 4,) * 3, **how})


def test_a_plan_counts_with_the_rate_between_the_workers_and_asks_for_it_once(
    client: Client, asked: list[object]
) -> None:
    first, second, deeper = planned(client), planned(client), planned(client, blocks=(EDGE // 2,) * 3)
    assert len(asked) == 1
    assert 0 < first.cluster.link < math.inf
    assert {first.cluster.link, second.cluster.link, deeper.cluster.link} == {measured.link_rate(client, "cpu")}
    assert str(first) == str(second)


def test_a_link_that_is_measured_to_be_faster_than_assumed_changes_no_plan(
    client: Client, asked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cluster.LINKS, "cpu", 1.0)
    assert planned(client).cluster.link == 1.0
    assert len(asked) == 1


def test_products_that_are_short_or_move_nothing_do_not_wait_for_a_measurement(
    client: Client, asked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned(client, blocks=(EDGE,) * 3).bytes_moved == 0
    monkeypatch.setattr(plan_request, "WORTH_MEASURING_SECONDS", 1.0)
    assert planned(client).cost.seconds < 1.0
    assert asked == []


def test_one_pair_of_workers_is_asked_within_a_host_and_one_between_hosts() -> None:
    hosts = {"a": "one", "b": "one", "c": "two", "d": "two", "e": "three"}
    assert list(measured._pairs(hosts)) == [("a", "b"), ("a", "c")]
    assert list(measured._pairs({"a": "one", "b": "two"})) == [("a", "b")]
    assert list(measured._pairs({"a": "one"})) == []


async def die(key: str, source: str, dask_worker: Worker) -> float:
    os._exit(1)


@pytest.mark.minutes
def test_a_worker_that_dies_during_the_measurement_does_no_harm(
    asked: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measured, "_fetch", die)
    a, b = operands()
    with forked.workers():
        local = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with local, Client(local, set_as_default=False) as client:
        product = distmm.matmul(a, b, client=client, blocks=(EDGE // 4,) * 3)
        assert len(asked) == 1
        assert "the bandwidth between workers could not be measured" in caplog.text
        assert set(measured._rates[client].values()) == {None}
        np.testing.assert_array_equal(client.compute(product, sync=True), a @ b)

"""The rate of copies from host memory to GPUs is measured once, where a plan uses it, and counts if it is lower."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, Worker

import distmm
from distmm import clusters
from distmm.clusters import cluster, measured
from distmm.product import request as plan_request
from distmm.product import resources

N = 60_000
PCIE_3 = 1.23e10


def first_worker_slow() -> float:
    (worker,) = Worker._instances
    return PCIE_3 if str(worker.name) == "0" else 5e10


def no_answer() -> None:
    time.sleep(5)


def no_room() -> float:
    raise MemoryError("the pool is full")


@pytest.fixture
def gpus(client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Two GPUs stand where the workers are, and the list has the text of each measurement."""
    described = distmm.gpus(2, "H200", host_memory="1TB").spec(np.dtype("f4"), None, "highest")
    seen: list[str] = []
    everywhere = measured.everywhere
    monkeypatch.setattr(measured, "_rates", type(measured._rates)())
    monkeypatch.setattr(cluster, "describe", lambda *args, **how: described)
    monkeypatch.setattr(resources, "link_rate", lambda *args: None)
    monkeypatch.setattr(
        measured, "everywhere", lambda *args, **how: seen.append(args[2].__name__) or everywhere(*args, **how)
    )
    return seen


def planned(client: Client, n: int = N) -> distmm.Plan:
    a = np.broadcast_to(np.float32(0), (n, n))
    return distmm.plan(a, a, client=client, device="gpu")


def test_a_plan_counts_with_the_slowest_gpu_and_asks_once(
    client: Client, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "copy_rate", first_worker_slow)
    plans = [planned(client) for _ in range(2)]
    assert [plan.cluster.load for plan in plans] == [1.2e10] * 2
    assert gpus == ["first_worker_slow"]
    assert plans[0].cost.seconds >= replace(plans[0], cluster=replace(plans[0].cluster, load=5e10)).cost.seconds


def test_a_short_product_is_not_worth_a_measurement(client: Client, gpus: list[str]) -> None:
    assert planned(client, 4096).cost.seconds < plan_request.WORTH_MEASURING_SECONDS
    assert gpus == []


def test_a_failed_measurement_changes_no_plan(
    client: Client, gpus: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measured, "copy_rate", no_room)
    assert planned(client).cluster.load == planned(client).cluster.load > PCIE_3
    assert "the rate of copies from host memory to GPUs could not be measured" in caplog.text
    assert gpus == ["no_room"]


def test_a_worker_that_does_not_answer_holds_up_no_plan(
    client: Client, gpus: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measured, "copy_rate", no_answer)
    monkeypatch.setattr(measured, "COPY_PATIENCE_SECONDS", 0.1)
    assert planned(client).cluster.load > PCIE_3
    assert "TimeoutError" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(clusters.missing_for_gpu() is not None, reason=str(clusters.missing_for_gpu()))
def test_gpus_are_measured_as_fast_as_a_bus_can_be() -> None:
    with clusters.local("gpu", dashboard=None) as client:
        rate: Any = measured.load_rate(client)
        assert 1e9 < rate < 1e12

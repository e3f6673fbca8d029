"""Waits for a cluster of which no worker runs, or that does not have the operands: what they say, and once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Worker

import distmm
from distmm import job
from distmm.all_workers import workers_of
from distmm.clusters import waiting
from distmm.errors import InputError
from tests.until import until

A = np.ones((40, 30))
LAZY = da.from_array(A, chunks=20)


def pause_above(client: Client, share: float) -> None:
    """Have workers pause above a share of their memory, and wait until all are paused, or none is."""

    def limit(dask_worker: Worker) -> None:
        dask_worker.memory_manager.memory_pause_fraction = share

    client.run(limit)
    status = "paused" if share < 1e-3 else "running"
    until(lambda: all(facts["status"] == status for facts in workers_of(client).values()))


def verified(client: Client) -> Any:
    with client.as_current():
        return distmm.verify(LAZY, LAZY.T, da.from_array(A @ A.T, chunks=20))


CALLS: dict[str, Callable[[Client], Any]] = {
    "verify": verified,
    "recheck": lambda client: job.recheck("C.zarr", client),
    "recheck of a reduced product": lambda client: job.recheck("T.zarr", client),
    "out": lambda client: distmm.matmul(A, A.T, client=client, out=np.empty((40, 40))) is not None,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let waits ask ten times a second; return a list that has an element for each answer."""
    answers: list[int] = []
    real = waiting._tell_stopped
    monkeypatch.setattr(waiting, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "REQUESTS", 10**6)  # however late an answer is
    monkeypatch.setattr(waiting, "_tell_stopped", lambda *facts: (real(*facts), answers.append(1)))
    return answers


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_wait_for_workers_that_are_all_paused_is_explained_once(
    call: Callable[[Client], Any], cluster: Callable[[int], Client], caplog: pytest.LogCaptureFixture,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[int],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    client = cluster(2)
    for name, each in {"A": A, "B": A.T}.items():
        np.save(f"{name}.npy", each)
    job.multiply("A.npy", "B.npy", "C.zarr", client=client)
    job.topk("A.npy", "B.npy", 2, "T.zarr", client=client)

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "paused" in record.getMessage()]

    pause_above(client, 1e-9)
    with caplog.at_level(logging.WARNING, "distmm"), ThreadPoolExecutor(1) as thread:
        result = thread.submit(call, client)
        until(told)
        asked.clear()
        until(lambda: len(asked) > 2)
        assert not result.done()
        (text,) = told()
        assert [address for address in workers_of(client) if address not in text] == []
        assert "memory_limit" in text
        pause_above(client, 0.99)
        assert result.result()


def test_a_wait_for_a_cluster_without_workers_is_explained_once(
    cluster: Callable[[int], Client], caplog: pytest.LogCaptureFixture, asked: list[int]
) -> None:
    client = cluster(1)
    with caplog.at_level(logging.WARNING, "distmm"), waiting.watched(client):
        client.cluster.scale(0)
        until(lambda: "the cluster has no workers" in caplog.text)
        asked.clear()
        until(lambda: len(asked) > 2)
    assert caplog.text.count("the cluster has no workers") == 1


def test_operands_whose_client_was_closed_are_refused_with_the_remedy(cluster: Callable[[int], Client]) -> None:
    client = cluster(1)
    with Client(client.scheduler.address, set_as_default=False) as other:
        x = other.persist(LAZY)
    with pytest.raises(InputError, match=r"the client that persisted them was closed\. Persist the operands again"):
        distmm.matmul(x, x.T, out=np.empty((40, 40)), client=client)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: distmm.matmul(x, x.T).compute(),
        lambda x: distmm.matmul(x, x.T, out=np.empty((40, 40))),
        lambda x: distmm.gram(x).persist().compute(),
        lambda x: distmm.topk(x, x.T, 3).compute(),
        lambda x: distmm.verify(x, x.T, da.from_array(A @ A.T, chunks=20)),
        lambda x: distmm.multiply(x, A.T, "C.npy"),
    ],
    ids=["compute", "out", "persist", "topk", "verify", "multiply"],
)
def test_operands_that_another_cluster_has_are_refused_with_the_remedy(
    call: Callable[[Any], Any], cluster: Callable[[int], Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    client, other = cluster(1), cluster(1)
    x = other.persist(LAZY)
    with client.as_current(), pytest.raises(InputError, match=r"does not have all persisted chunks .* give the client"):
        call(x)
    with other.as_current():
        call(x)

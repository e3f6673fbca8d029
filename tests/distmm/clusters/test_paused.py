"""Waits for a cluster whose workers are all paused by their memory: a warning names the workers and the remedy."""

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
from tests.until import until

A = np.ones((40, 30))


def pause_above(client: Client, share: float) -> None:
    """Have workers pause above a share of their memory, and wait until all are paused, or none is."""

    def limit(dask_worker: Worker) -> None:
        dask_worker.memory_manager.memory_pause_fraction = share

    client.run(limit)
    status = "paused" if share < 1e-3 else "running"
    until(lambda: all(facts["status"] == status for facts in workers_of(client).values()))


def verified(client: Client) -> Any:
    with client.as_current():
        return distmm.verify(*(da.from_array(each, chunks=20) for each in (A, A.T, A @ A.T)))


CALLS: dict[str, Callable[[Client], Any]] = {
    "verify": verified,
    "recheck": lambda client: job.recheck("C.zarr", client),
    "recheck of a reduced product": lambda client: job.recheck("T.zarr", client),
    "out": lambda client: distmm.matmul(A, A.T, client=client, out=np.empty((40, 40))) is not None,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_wait_for_workers_that_are_all_paused_is_explained_once(
    call: Callable[[Client], Any], cluster: Callable[[int], Client], caplog: pytest.LogCaptureFixture,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    client = cluster(2)
    for name, each in {"A": A, "B": A.T}.items():
        np.save(f"{name}.npy", each)
    job.multiply("A.npy", "B.npy", "C.zarr", client=client)
    job.topk("A.npy", "B.npy", 2, "T.zarr", client=client)
    asked: list[int] = []
    real = waiting._tell_paused
    monkeypatch.setattr(waiting, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "REQUESTS", 10**6)  # however late an answer is
    monkeypatch.setattr(waiting, "_tell_paused", lambda *facts: (real(*facts), asked.append(1)))

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

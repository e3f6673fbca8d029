"""What tests of several folders need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

from distmm.clusters import cluster as described_cluster
from distmm.planning import families
from distmm.product import one_task
from distmm.worker import gpu
from distmm.worker.tasks import products as product_tasks


@pytest.fixture(autouse=True)
def by_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the current client's cluster compute the products of tests, which are short."""
    monkeypatch.setattr(one_task, "SHORT_SECONDS", 0.0)


@pytest.fixture
def blocks_are_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans take the chunks of Dask arrays as blocks, unless there are many."""
    monkeypatch.setattr(families, "SOME_PRODUCTS", families.MANY_PRODUCTS)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let plans find so many bytes on each worker."""
    described = described_cluster.describe

    def limit(size: int) -> None:
        monkeypatch.setattr(
            described_cluster, "describe", lambda *args, **how: replace(described(*args, **how), memory=size)
        )

    return limit


@pytest.fixture
def cluster() -> Iterator[Callable[[int], Client]]:
    """Clusters of workers in this process."""
    opened: list[Any] = []

    def start(workers: int) -> Client:
        with dask.config.set({"distributed.scheduler.work-stealing": False}):
            local = LocalCluster(n_workers=workers, threads_per_worker=1, processes=False, dashboard_address=":0")
        client = Client(local, set_as_default=False)
        opened.extend((local, client))
        return client

    yield start
    for one in reversed(opened):
        one.close()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """A way to give workers room for so many blocks of C in a wave; products of larger waves fail after the first."""
    monkeypatch.setattr(gpu, "PAUSES", (0.0,))
    real = product_tasks.multiply

    def limit(most: int, error: Exception) -> list[int]:
        waves: list[int] = []

        def multiply(where: Any, *rest: Any, **how: Any) -> Any:
            if how["tasks"] not in waves:
                waves.append(how["tasks"])
            if how["tasks"] > most and (where.i, where.j) != (0, 0):
                raise error
            return real(where, *rest, **how)

        monkeypatch.setattr(product_tasks, "multiply", multiply)
        return waves

    return limit

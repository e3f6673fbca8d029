"""A GPU worker starts its memory pool only when the GPU has room for it."""

from __future__ import annotations

import asyncio
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Scheduler, Worker, WorkerPlugin

from distmm.worker import gpu_memory


def worker(*plugins: object) -> Any:
    return types.SimpleNamespace(name="gpu-1", _pending_plugins=plugins)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes in use of a GPU of 100 bytes: each look takes one number from this list."""
    looks: list[int] = []
    nvml = types.SimpleNamespace(
        one_time=lambda: {"memory-total": 100}, real_time=lambda: {"memory-used": looks.pop(0)}
    )
    utils = types.SimpleNamespace(parse_device_bytes=lambda size, alignment_size: int(size * 100))
    monkeypatch.setattr("distributed.diagnostics.nvml", nvml)
    monkeypatch.setitem(sys.modules, "dask_cuda", types.SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "dask_cuda.utils", utils)
    monkeypatch.setattr(gpu_memory, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(gpu_memory, "PAGE", 4)
    return looks


def test_it_waits_until_the_dead_process_has_given_its_memory_back(used: list[int]) -> None:
    used += [90, 70, 50, 0]
    asyncio.run(gpu_memory.dask_setup(worker(object(), types.SimpleNamespace(initial_pool_size=0.5))))
    assert used == [0]


def test_the_pool_has_whole_pages_of_cuda(used: list[int]) -> None:
    used += [0]
    pool = types.SimpleNamespace(initial_pool_size=0.5)
    asyncio.run(gpu_memory.dask_setup(worker(pool)))
    assert pool.initial_pool_size == 48


def test_workers_without_a_pool_do_not_look(used: list[int]) -> None:
    asyncio.run(gpu_memory.dask_setup(worker(object(), types.SimpleNamespace(initial_pool_size=None))))
    assert used == []


class Pool(WorkerPlugin):
    """Stands for dask-cuda's plugin."""

    initial_pool_size, made = 0.5, False

    def setup(self, worker: Any) -> None:
        self.made = True


def test_a_worker_does_not_start_where_another_process_keeps_the_memory(
    used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    used += [60] * 3
    monkeypatch.setattr(gpu_memory, "PATIENCE_SECONDS", -1.0)
    pool = Pool()

    async def start() -> None:
        async with Scheduler(dashboard_address=":0", port=0) as scheduler:
            await Worker(scheduler.address, name="gpu-1", plugins=[pool], preload=["distmm.worker.gpu_memory"])

    message = r"the pool of worker gpu-1 takes \S+ B, and \S+ B of the GPU is free.*DASK_DISTMM__GPU_POOL=8GB"
    with pytest.raises(RuntimeError, match="Worker failed to start") as raised:
        asyncio.run(start())
    assert re.match(message, str(raised.value.__cause__))
    assert not pool.made

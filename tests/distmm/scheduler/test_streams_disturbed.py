"""Streamed products that lose a worker, or are cancelled, when some waves have been read and others are to come."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, Worker

import distmm
from distmm.clusters import view
from tests import forked
from tests.distmm.scheduler.known import known
from tests.distmm.scheduler.streamed import BLOCK, EDGE, TEXT, enough, left, operands
from tests.until import until


def sums(C: da.Array, gate: Path) -> da.Array:
    """The sum of each block of C; those of its lower half wait for a file, and note in another one that they do."""

    def read(block: np.ndarray, block_info: Any = None) -> np.ndarray:
        i, j = block_info[0]["chunk-location"]
        if i >= 4:
            gate.with_name(f"waits.{os.getpid()}.{i}.{j}").touch()
            until(gate.exists)
        return block.sum(keepdims=True)

    return C.map_blocks(read, chunks=(1, 1), dtype="f8", meta=np.empty((0, 0)))


def wait_for_readers(gate: Path, workers: int) -> None:
    """Wait until each worker has read what it may: the waves of the upper half."""
    until(lambda: len({path.name.split(".")[1] for path in gate.parent.glob("waits.*")}) == workers)


def expected() -> np.ndarray:
    a, b = operands()
    return (a @ b).reshape(8, EDGE, 8, EDGE).sum(axis=(1, 3))


@contextmanager
def two_workers() -> Iterator[Client]:
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False, "distributed.scheduler.allowed-failures": 100}),
        forked.workers(),
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="2GiB", dashboard_address=":0") as two,
        Client(two, set_as_default=False) as client,
    ):
        yield client


@pytest.mark.minutes
def test_a_killed_worker_costs_a_streamed_product_time_and_no_blocks(
    memory: Callable[[int], None], tmp_path: Path
) -> None:
    a, b = operands()
    text = f"g2x1x1 b{EDGE}x{EDGE}x{EDGE} p1 w4x8 l2"  # 32 waves of one block a worker
    with two_workers() as client, client.as_current():
        memory(enough(text))
        assert distmm.plan(a, b, plan=text).streamed
        C = distmm.matmul(a, b, plan=text)
        gate = tmp_path / "gate"
        result = client.compute(sums(C, gate))
        wait_for_readers(gate, workers=2)
        # Blocks of the killed worker have been read, and have left: the sums that it had of them are lost.
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        gate.touch()
        np.testing.assert_array_equal(result.result(), expected())
        result.release()
        until(lambda: not client.run_on_scheduler(left))


def blocks_of(dask_worker: Worker, names: set[str]) -> list[str]:
    return [str(key) for key in dask_worker.state.tasks if isinstance(key, tuple) and key[0] in names]


@pytest.mark.minutes
def test_a_streamed_product_that_is_cancelled_leaves_nothing(
    client: Client, memory: Callable[[int], None], tmp_path: Path
) -> None:
    a, b = operands()
    view.ask(client)
    with client.as_current():
        memory(enough() + BLOCK)
        tasks, products = known(client), client.run_on_scheduler(left)
        C = distmm.matmul(a, b, plan=TEXT)
        gate = tmp_path / "gate"
        asked = sums(C, gate)
        result = client.compute(asked)
        wait_for_readers(gate, workers=4)
        assert C.name in client.run_on_scheduler(left)
        client.cancel(result)
        gate.touch()
        until(lambda: client.run_on_scheduler(left) <= products)
        until(lambda: known(client) <= tasks)
        names = set(asked.dask.layers)
        until(lambda: not any(client.run(blocks_of, names=names).values()))
        # Nothing of it stands in the way of the same product.
        np.testing.assert_array_equal(sums(distmm.matmul(a, b, plan=TEXT), gate).compute(), expected())
        until(lambda: client.run_on_scheduler(left) <= products)

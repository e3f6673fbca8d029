"""A product several times larger than the memory of its workers, which hold no more than the plan says."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.utils import set_thread_state

from distmm import job
from distmm.planning.plan import Plan
from distmm.storage import create_output, open_matrix
from distmm.worker import worker_slots
from distmm.worker.worker_slots import slot_released

LIMIT = 320 * 2**20


@pytest.fixture
def small() -> Iterator[Client]:
    """Two workers with little memory, of which the libraries take half."""
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=LIMIT, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def peak() -> int:
    """Largest resident set of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.minutes
def test_no_worker_holds_more_than_the_plan_says(small: Client, tmp_path: Path) -> None:
    n, k = 8000, 256
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((n, k), dtype="f4"), rng.standard_normal((k, n), dtype="f4")
    for name, values in {"A": a, "B": b}.items():
        target = create_output(tmp_path / f"{name}.zarr", values.shape, "f4", (256, 256))
        for i in range(0, values.shape[0], 256):
            for j in range(0, values.shape[1], 256):
                target[i : i + 256, j : j + 256] = values[i : i + 256, j : j + 256]
        target.output.commit()
    plans: list[Plan] = []
    summary = job.multiply(
        tmp_path / "A.zarr", tmp_path / "B.zarr", tmp_path / "C.zarr", client=small, blocks=(1000, 128, 1000),
        announce=lambda plan, flops: plans.append(plan),
    )  # fmt: skip
    (plan,) = plans
    assert 4 * n * n > 2 * plan.cluster.memory
    assert len(plan.waves) > 1
    baseline = 0.8 * LIMIT - plan.cluster.memory / 0.8  # what the libraries take, as the plan found it
    measured = max(small.run(peak).values()) - baseline
    assert measured <= plan.cluster.memory / 0.8, f"{measured / 1e6:.0f} MB, planned {plan.peak.worker / 1e6:.0f} MB"
    assert summary.recomputed == 0
    c = open_matrix(tmp_path / "C.zarr")
    np.testing.assert_allclose(c[3500:3600], a[3500:3600] @ b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("most", "leave"), [(2, 2), (math.inf, 5)])
def test_as_many_tasks_leave_their_slots_as_may(most: float, leave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr("distributed.secede", lambda: left.append(threading.get_ident()))
    inside, end = threading.Barrier(6), threading.Event()

    def write() -> None:
        with set_thread_state(key="task"), slot_released("write", most):
            inside.wait(60)
            end.wait(60)

    for _ in range(2):  # those that have ended make room for others
        left.clear()
        end.clear()
        with ThreadPoolExecutor(5) as pool:
            tasks = [pool.submit(write) for _ in range(5)]
            inside.wait(60)
            assert len(left) == leave
            end.set()
            for task in tasks:
                task.result()
    assert not worker_slots._running["write"]


def test_outside_of_a_cluster_nothing_leaves() -> None:
    with slot_released("load"):
        assert not worker_slots._running["load"]

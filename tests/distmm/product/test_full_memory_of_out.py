"""A product that is written starts again with a smaller plan when the memory of a worker is full, and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, Worker

import distmm
from distmm import clusters
from distmm.errors import DeviceMemoryError
from distmm.product import out_target, smaller_plan
from tests.tables import later

Cluster = Callable[[int], Client]
Room = Callable[..., list[int]]

PLAN = "g2x1x1 b20x30x20 p1 w1 l2"  # 36 blocks of C in one wave
FULL = DeviceMemoryError("the GPU's memory is full: a block of C found no room")


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.integers(-8, 9, (120, 60)).astype("f4"), rng.integers(-8, 9, (60, 120)).astype("f4")


@pytest.mark.parametrize("error", [FULL, MemoryError("std::bad_alloc: 8 GB")])
@pytest.mark.parametrize("how", later(["out", "compute", "in place"]))
def test_the_product_starts_again_with_a_smaller_plan_and_says_so(
    how: str,
    error: Exception,
    cluster: Cluster,
    room: Room,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = operands()
    client, waves = cluster(2), room(20, error)
    if how == "compute":
        monkeypatch.setattr(out_target, "target", lambda out, _: out)  # workers in this process write into its arrays
        with client.as_current(), dask.config.set(scheduler=client):
            c = distmm.matmul(a, b, plan=PLAN).compute()
    elif how == "out":
        c = distmm.matmul(a, b, plan=PLAN, client=client, out=np.full((120, 120), np.nan, "f4"))
    else:  # blocks that were written before the error are not added again
        c = np.ones((120, 120), "f4")
        distmm.gemm(1, a, b, 3, c, plan=PLAN, client=client, out=c)
    np.testing.assert_array_equal(c, a @ b + 3 * (how == "in place"))
    assert waves[0] == 36
    assert max(waves[1:]) <= 20
    assert str(error) in caplog.text
    assert "the memory of a worker was full with plan g2x1x1 b20x30x20 p1 w1 l2" in caplog.text
    assert "the product starts again with plan" in caplog.text


def test_memory_that_stays_full_ends_the_product_with_the_figures_and_the_remedy(cluster: Cluster, room: Room) -> None:
    a, b = operands()
    waves = room(0, FULL)
    remedy = r"found no room\. The plan was g2x1x1.*peak of \S+ kB a worker, and .*: use smaller blocks \(blocks=\)"
    with pytest.raises(DeviceMemoryError, match=remedy):
        distmm.matmul(a, b, plan=PLAN, client=cluster(2), out=np.zeros((120, 120), "f4"))
    assert 1 < len(waves) <= 1 + len(smaller_plan.SHARES)


def test_full_memory_of_the_client_is_no_reason_for_another_plan(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(np.ndarray):
        tries = 0

        def __setitem__(self, *_: Any) -> None:
            type(self).tries += 1
            raise MemoryError("no room for a block in this process")

    monkeypatch.setattr(out_target, "target", lambda *_: None)  # this process writes the blocks that it fetches
    a, b = operands()
    with pytest.raises(MemoryError, match="no room for a block in this process") as caught:
        distmm.matmul(a, b, plan=PLAN, client=cluster(2), out=np.zeros((120, 120), "f4").view(Full))
    assert not isinstance(caught.value, DeviceMemoryError)
    assert Full.tries == 1


def test_without_a_cluster_there_is_no_smaller_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("of this process")

    monkeypatch.setattr("distmm.product.sinks.store", full)
    a, b = operands()
    with pytest.raises(MemoryError, match="of this process"):
        distmm.matmul(a, b, out=np.zeros((120, 120), "f4"), blocks=(60, 60, 60))


def take_all_but(nbytes: int, dask_worker: Worker) -> None:
    """Take the memory of the worker's GPU in pieces, as another program would, and leave some of it free."""
    import cupy

    piece, dask_worker.taken = 1 << 26, []  # first of all this frees what an earlier call has taken
    try:
        while True:
            dask_worker.taken.append(cupy.empty(piece, "u1"))
    except MemoryError:
        del dask_worker.taken[-(nbytes // piece) :]


@pytest.mark.gpu
def test_a_product_on_a_gpu_that_another_program_fills_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    n = 16384
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, (n, n)).astype("f4") for _ in range(2))
    with clusters.local("gpu", workers=1, dashboard=None, quiet=True) as client, caplog.at_level(logging.WARNING):
        free = distmm.matmul(a, b, out=np.full((n, n), np.nan, "f4"), client=client)
        plan = distmm.plan(a, b, out=free, client=client)  # it counts the whole pool, as the next call does
        # Tasks that find no room are retried alone first. How little memory makes that fail depends on the GPU.
        for share in (0.6, 0.5, 0.4, 0.3, 0.2, 0.1):
            client.run(take_all_but, int(share * plan.peak.worker))
            c = distmm.matmul(a, b, out=np.full((n, n), np.nan, "f4"), client=client)
            np.testing.assert_array_equal(c, free)
            if "the product starts again with plan" in caplog.text:
                break
    assert "the product starts again with plan" in caplog.text
    np.testing.assert_allclose(c[::1000], a[::1000] @ b, rtol=1e-5)

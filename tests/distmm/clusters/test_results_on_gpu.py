"""A client gets CuPy results of workers of its host from GPU to GPU, and by the scheduler if that fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes  # noqa: F401  tells NumPy the names of its types
import numpy as np
import pytest
from distributed import Client, wait

import distmm
from distmm.clusters import results, view
from distmm.transfer import gpu_allocations
from distmm.worker import neighbours

pytestmark = pytest.mark.gpu

N = 1100


@pytest.fixture(scope="module", params=["tcp", "pool", "ucx"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Client]:
    """One worker: of a cluster without options, with a pool, with UCX."""
    cuda, more = pytest.importorskip("dask_cuda"), {}
    if request.param == "ucx":
        pytest.importorskip("distributed_ucxx")
        more = {"protocol": "ucx"}
    if request.param != "tcp":
        more = {**more, "rmm_pool_size": "2GB"}
    with cuda.LocalCUDACluster(n_workers=1, dashboard_address=":0", **more) as cluster, Client(cluster) as client:
        view.ask(client)
        with distmm.accelerated():
            yield client


def made(form: str, dtype: str) -> Any:
    import cupy

    block = (cupy.arange(3 * N * N).reshape(3, N, N) % 31).astype(np.dtype(dtype))
    forms = {"stack": block, "turned": block[1].T, "vector": block[0].ravel(), "small": block[0, :3, :3]}
    return forms[form] if form in forms else block[2, ::2, ::2]


def expected(form: str) -> np.ndarray:
    block = (np.arange(3 * N * N).reshape(3, N, N) % 31).astype("f4")
    forms = {"stack": block, "turned": block[1].T, "vector": block[0].ravel(), "small": block[0, :3, :3]}
    return forms[form] if form in forms else block[2, ::2, ::2]


@pytest.fixture
def tickets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tickets that this process gets."""
    found: list[Any] = []
    real = neighbours.received

    def noted(named: Any) -> Any:
        found.extend(named)
        return real(named)

    monkeypatch.setattr(neighbours, "received", noted)
    return found


@pytest.mark.parametrize("form", ["stack", "turned", "vector", "small", "gaps"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128"])
def test_a_result_is_right(gpu: Client, tickets: list[Any], form: str, dtype: str) -> None:
    result = gpu.submit(made, form, dtype, pure=False).result()
    assert type(result).__module__.startswith("cupy")
    assert result.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(result.get().astype("c16").real, expected(form))
    assert len(tickets) == (form not in ("small", "gaps"))


def test_many_results_come_at_once(gpu: Client, tickets: list[Any]) -> None:
    futures = [gpu.submit(made, "stack", "float32", pure=False) for _ in range(8)]
    numbers = gpu.map(int, range(5))
    for each in gpu.gather(futures):
        np.testing.assert_array_equal(each.get(), expected("stack"))
    assert (gpu.gather(numbers), len(tickets)) == (list(range(5)), 8)


def test_a_map_is_closed_soon_after_the_copy(gpu: Client) -> None:
    assert gpu.submit(made, "stack", "float32", pure=False).result().shape == (3, N, N)
    end = time.monotonic() + 60
    while gpu_allocations._maps and time.monotonic() < end:
        time.sleep(0.1)
    assert not gpu_allocations._maps


def test_a_result_that_cannot_be_copied_comes_by_the_scheduler(
    gpu: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Any] = []

    def out_of_reach(named: Any) -> Any:
        tried.extend(named)
        raise OSError("out of reach")

    with Client(gpu.scheduler.address, set_as_default=False) as other, caplog.at_level(logging.WARNING):
        view.ask(other)
        monkeypatch.setattr(neighbours, "received", out_of_reach)
        for _ in range(2):  # the second time, the worker is not asked any more
            future = other.submit(made, "stack", "float32", pure=False)
            wait(future)
            np.testing.assert_array_equal(future.result().get(), expected("stack"))
        assert (len(tried), "come by the scheduler from now on" in caplog.text) == (1, True)
        assert "was not copied from GPU to GPU: out of reach" in caplog.text


def test_dask_gets_them_as_before_if_products_are_not_accelerated(gpu: Client, tickets: list[Any]) -> None:
    results.by_tickets(False)
    try:
        result = gpu.submit(made, "stack", "float32", pure=False).result()
    finally:
        results.by_tickets(True)
    np.testing.assert_array_equal(result.get(), expected("stack"))
    assert not tickets

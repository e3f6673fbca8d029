"""A short product of arrays of the client's process is a call there, unless the caller says where or how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client

import distmm
from distmm.product import one_task, sinks
from distmm.product.choices import Choices
from tests.distmm.product.small_products import PRODUCTS, A, B, N


@pytest.fixture
def unused(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A current client that must not be used."""

    def refused(*args: Any, **how: Any) -> None:
        raise AssertionError("the cluster is used")

    with client.as_current():
        monkeypatch.setattr(one_task, "SHORT_SECONDS", 0.01)
        monkeypatch.setattr(sinks, "store_block", refused)
        monkeypatch.setattr(sinks, "store", refused)
        yield


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_a_short_product_is_a_call_in_the_clients_process(unused: None, name: str) -> None:
    multiply, expected = PRODUCTS[name]
    out = np.full(expected.shape, 7, expected.dtype)
    assert multiply(out=out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(multiply().compute(), expected)


def test_a_short_product_reads_the_old_c_that_is_also_out(unused: None) -> None:
    C = A.copy()
    assert distmm.gemm(1, A, B, 2, C, out=C) is C
    np.testing.assert_array_equal(C, A @ B + 2 * A)


@pytest.mark.parametrize(
    "how", [{"blocks": (N, N, N)}, {"kernel": "cpu"}, {"client": "named"}, {"precision": "ieee"}, {"plan": "a text"}]
)
def test_a_product_goes_to_the_cluster_if_the_caller_says_how(
    client: Client, unused: None, how: dict[str, Any]
) -> None:
    if "plan" in how:
        how = {"plan": str(distmm.plan(A, B))}
    with pytest.raises(AssertionError, match="the cluster is used"):
        distmm.matmul(A, B, out=np.empty((N, N)), **({"client": client} if "client" in how else how))


@pytest.mark.parametrize("rows", [0, 5])
def test_a_short_product_of_chunks_goes_to_the_cluster(
    client: Client, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(one_task, "SHORT_SECONDS", 0.01)
    monkeypatch.setattr(one_task, "computed", Mock(side_effect=AssertionError("a call")))
    with client.as_current():
        chunks = da.from_array(A, 20)[:rows]
        for lazy in (chunks, chunks.persist()):
            for product, expected in (
                (distmm.matmul(lazy, B), A[:rows] @ B),
                (distmm.gemm(1, A[:rows], B, 1, lazy), A[:rows] @ B + A[:rows]),
            ):
                np.testing.assert_array_equal(product.compute(), expected)


def test_a_long_product_goes_to_the_cluster(unused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_task, "SHORT_SECONDS", 0.0)
    with pytest.raises(AssertionError, match="the cluster is used"):
        distmm.matmul(A, B, out=np.empty((N, N)))


@pytest.mark.parametrize(
    "little", [{"memory": 7 * A.nbytes}, {"rate": A.size * 2 * N / 2}], ids=["an eighth of the memory", "a second"]
)
def test_a_product_that_takes_much_here_is_planned(monkeypatch: pytest.MonkeyPatch, little: dict[str, float]) -> None:
    described = one_task._described
    monkeypatch.setattr(one_task, "_described", lambda *at, **how: replace(described(*at, **how), **little))
    monkeypatch.setattr(one_task, "computed", Mock(side_effect=AssertionError("a call")))
    np.testing.assert_array_equal(distmm.matmul(A, B).compute(), A @ B)
    np.testing.assert_array_equal(distmm.matmul(A, B, out=np.empty((N, N))), A @ B)


def test_a_file_whose_chunks_are_larger_than_the_memory_is_refused_before_it_is_written(tmp_path: Path) -> None:
    out = zarr.create_array(str(tmp_path / "C.zarr"), shape=(N, N), chunks=(10**6, 10**6), dtype="f8")
    with pytest.raises(distmm.DoesNotFitError, match="make out with smaller chunks"):
        distmm.matmul(A, B, out=out)


@pytest.mark.parametrize("how", [{}, {"kernel": "cpu"}, {"precision": "ieee"}, {"device": "cpu"}], ids=str)
def test_a_short_product_without_a_cluster_is_a_call(monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    computed = Mock(side_effect=one_task.computed)
    monkeypatch.setattr(one_task, "computed", computed)
    np.testing.assert_array_equal(distmm.matmul(A, B, **how).compute(), A @ B)
    np.testing.assert_array_equal(distmm.matmul(A, B, out=np.empty((N, N)), **how), A @ B)
    assert computed.call_count == 2


@pytest.mark.parametrize("out", [np.empty((N, N), "f4")[:, ::-1], [[0.0]], np.empty((N, N + 1))])
def test_a_short_product_refuses_what_a_long_one_does(unused: None, out: Any) -> None:
    with pytest.raises(distmm.InputError):
        distmm.matmul(A[:, :5], B[:5].astype("c16"), out=out)


@pytest.mark.parametrize("where", [{"workers": "nobody"}, {"resources": {"GPU": 1}}, {"priority": 1}])
def test_the_cluster_multiplies_what_the_caller_annotates(unused: None, where: dict[str, Any]) -> None:
    with dask.annotate(**where), pytest.raises(AssertionError, match="the cluster is used"):
        distmm.matmul(A, B, out=np.empty((N, N)))
    with dask.annotate(**where):
        lazy = distmm.matmul(A, B)
    with pytest.raises(AssertionError, match="the cluster is used"):
        lazy.compute()


@pytest.fixture(scope="module")
def gpus() -> Iterator[Client]:
    cuda = pytest.importorskip("dask_cuda")
    with cuda.LocalCUDACluster(n_workers=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        yield client


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 5, 300])
def test_short_products_of_cupy_chunks_are_the_clusters(
    gpus: Client, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(one_task, "SHORT_SECONDS", 0.01)
    monkeypatch.setattr(one_task, "computed", Mock(side_effect=AssertionError("a call")))
    a = cupy.ones((300, 300), "f4")
    X = da.from_array(a, 100, asarray=False)[:rows]
    for product in (distmm.matmul(X, X.T), distmm.matmul(X, a), distmm.matmul(X, a).persist()):
        got = product.compute()
        assert isinstance(got, cupy.ndarray)
        assert (got == 300).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "i1", "f2"])
@pytest.mark.parametrize("short", [0.01, 0.0])
def test_short_products_of_the_clients_gpu_arrays_are_right_wherever_they_run(
    gpus: Client, monkeypatch: pytest.MonkeyPatch, short: float, dtype: str
) -> None:
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(one_task, "SHORT_SECONDS", short)
    calls: list[Any] = []
    real = one_task.computed
    monkeypatch.setattr(one_task, "computed", lambda *how: calls.append(how) or real(*how))
    a = np.random.default_rng(5).integers(-1, 2, (300, 300)).astype(dtype)
    A, out, stream = cupy.zeros_like(cupy.asarray(a)), cupy.zeros_like(cupy.asarray(a)), cupy.cuda.Stream()
    with stream:  # the caller's work is waited for, and its stream sees the product
        x = cupy.ones((8192, 8192), "f4")
        for _ in range(10):
            x = x @ x / 8192
        A[...] = cupy.asarray(a)
        assert distmm.matmul(A, A.T, out=out) is out
        after = out + 0
    stream.synchronize()
    wide = np.result_type(dtype, "f8")
    expected = (a.astype(wide) @ a.T.astype(wide)).astype(dtype)
    np.testing.assert_array_equal(after.get(), expected)
    for C in (distmm.matmul(A, A.T), distmm.gram(A), distmm.gemm(2, A, A, -1, out, transb=True)):
        got = C.compute()
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_array_equal(got.get(), expected)
    assert len(calls) == (4 if short else 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("workers", "here"), [(1, True), (2, False)])
def test_a_longer_product_of_the_clients_gpu_arrays_is_a_call_if_the_cluster_has_no_other_gpu(
    gpus: Client, monkeypatch: pytest.MonkeyPatch, workers: int, here: bool
) -> None:
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(one_task, "SHORT_SECONDS", 1e-12)
    described = Choices.described
    monkeypatch.setattr(Choices, "described", lambda *how, **more: replace(described(*how, **more), workers=workers))
    computed = Mock(side_effect=one_task.computed)
    monkeypatch.setattr(one_task, "computed", computed)
    a = cupy.ones((300, 300), "f4")
    assert (distmm.matmul(a, a).compute() == 300).all()
    assert (distmm.matmul(a, a, out=cupy.empty_like(a)) == 300).all()
    assert computed.call_count == (2 if here else 0)

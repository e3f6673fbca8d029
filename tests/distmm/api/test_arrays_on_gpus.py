"""Arrays of the client on a GPU are operands and `out` of a cluster's products, in their own memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import dask.array as da
import numpy as np
import pytest
from distributed import Client

import distmm
from distmm import clusters
from distmm.errors import InputError
from distmm.transfer import client_array, lending

pytestmark = pytest.mark.gpu

N = 1100


@pytest.fixture(scope="module")
def gpus() -> Iterator[Client]:
    pytest.importorskip("dask_cuda")
    with clusters.local(device="gpu", dashboard=None) as client:
        yield client


def whole(*shape: int, seed: int = 0) -> np.ndarray:
    """Small whole numbers, whose products float32 holds exactly."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype("f4")


def slow(stream: Any, cupy: Any) -> None:
    """Have a stream work for some tenths of a second."""
    x = cupy.ones((8192, 8192), "f4")
    for _ in range(10):
        x = x @ x
        x /= 8192


def test_cupy_arrays_give_a_cupy_array_and_nothing_goes_through_the_scheduler(gpus: Client) -> None:
    import cupy

    a, b, c = whole(N, N), whole(N, N, seed=1), whole(N, N, seed=2)
    A, B, C = map(cupy.asarray, (a, b, c))
    product = distmm.gemm(2, A, B, -1, C, transb=True)
    assert any(isinstance(x, client_array.ClientArray) for x in _constants(product))
    value = product.compute()
    assert isinstance(value, cupy.ndarray)
    np.testing.assert_array_equal(value.get(), 2 * a @ b.T - c)
    np.testing.assert_array_equal(product.persist().compute().get(), 2 * a @ b.T - c)


def test_symmetric_products_and_checks_read_cupy_arrays(gpus: Client) -> None:
    import cupy

    a, b = whole(N, N), whole(N, N, seed=1)
    A, B = cupy.asarray(a), cupy.asarray(b)
    np.testing.assert_array_equal(distmm.gram(A).compute().get(), a @ a.T)
    assert distmm.verify(A, B, distmm.matmul(A, B), check="full").ok


def _constants(array: Any) -> list[Any]:
    from distmm.transfer.loan_readers import _lent_to

    return [found for layer in array.dask.layers.values() for task in dict(layer).values() for found in _lent_to(task)]


@pytest.fixture
def by_dask(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Dask fetches through the scheduler."""
    found: list[Any] = []
    get = Client.get

    def noted(self: Client, dsk: Any, keys: Any, **how: Any) -> Any:
        if how.get("sync", True):
            found.append(keys)
        return get(self, dsk, keys, **how)

    monkeypatch.setattr(Client, "get", noted)
    return found


def chunked(array: np.ndarray, edge: int) -> da.Array:
    """Return a Dask array with CuPy chunks, which tasks make."""
    chunks = da.from_array(array, edge)
    return chunks.map_blocks(to_device, dtype=array.dtype, meta=cupy_meta(array.dtype))


def to_device(block: np.ndarray) -> Any:
    """Return a CuPy copy."""
    import cupy

    return cupy.asarray(block)


def cupy_meta(dtype: Any) -> Any:
    """Return an empty CuPy matrix."""
    import cupy

    return cupy.empty((0, 0), dtype)


@pytest.mark.parametrize("edge", [N, 500])
def test_blocks_of_a_dask_array_come_to_the_clients_gpu(gpus: Client, by_dask: list[Any], edge: int) -> None:
    import cupy

    x = whole(N, N)
    X = chunked(x, edge)
    for product, expected in (
        (distmm.matmul(X.T, X), x.T @ x),
        (distmm.matmul(X, X.T), x @ x.T),
        (distmm.gram(X), x @ x.T),
        (distmm.gemm(2, X, X, -1, X, transa=True).T, (2 * x.T @ x - x).T),
        (distmm.einsum("ij,jk->ki", X, X), (x @ x).T),
    ):
        value = product.compute()
        assert isinstance(value, cupy.ndarray)
        assert value.device.id == cupy.cuda.Device().id
        np.testing.assert_array_equal(value.get(), expected)
    by_dask.clear()
    for product in (distmm.matmul(X.T, X), distmm.matmul(X, X).persist(), distmm.gram(X)):
        assert isinstance(product.compute(), cupy.ndarray)
    assert not by_dask
    assert not distmm.matmul(X[:0], X).compute().size


@pytest.mark.parametrize("without", ["host", "GPU", "memory"])
def test_where_workers_do_not_reach_the_clients_gpu_dask_fetches_the_blocks(
    gpus: Client, by_dask: list[Any], monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    import cupy

    x, full = whole(N, N), cupy.cuda.memory.OutOfMemoryError(1, 2, 3)
    if without == "host":  # as on another host
        monkeypatch.setattr(lending, "_within_reach", lambda client: False)
    elif without == "GPU":  # as with MIG
        monkeypatch.setattr(lending.gpu_allocations, "secret", lambda _: (None, 0, b""))
        lending.forget_reach(gpus)
    else:
        monkeypatch.setattr(lending.gpu_allocations, "behind", lambda array: None)
        monkeypatch.setattr(lending.gpu_allocations, "plain", Mock(side_effect=full))
    C = distmm.matmul(chunked(x, 500), chunked(x, 500))
    for product in (C, C.persist()):
        value = product.compute()
        assert isinstance(value, cupy.ndarray)
        np.testing.assert_array_equal(value.get(), x @ x)
    assert len(by_dask) == 2
    lending.forget_reach(gpus)


def test_memory_of_the_client_without_a_handle_is_replaced(gpus: Client, by_dask: list[Any]) -> None:
    import cupy

    x = whole(N, N)
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        value = distmm.matmul(chunked(x, 500), chunked(x, 500)).compute()
    np.testing.assert_array_equal(value.get(), x @ x)
    assert not by_dask


@pytest.mark.parametrize("view", ["as it is", "transposed", "slice", "rows from the last", "every second"])
def test_views_are_read_and_filled(gpus: Client, view: str) -> None:
    import cupy

    views = {
        "as it is": lambda x: x[:N, :N],
        "transposed": lambda x: x[:N, :N].T,
        "slice": lambda x: x[7 : 7 + N, 33 : 33 + N],
        "rows from the last": lambda x: x[:N, :N][::-1],
        "every second": lambda x: x[::2, ::2],
    }
    large = whole(2 * N, 2 * N)
    A, OUT = cupy.asarray(large), cupy.zeros((2 * N, 2 * N), "f4")
    expected = np.zeros((2 * N, 2 * N), "f4")
    take = views[view]
    take(expected)[...] = take(large) @ take(large)
    out = take(OUT)
    assert distmm.matmul(take(A), take(A), out=out) is out
    np.testing.assert_array_equal(OUT.get(), expected)


def test_work_of_the_caller_is_waited_for_and_sees_the_product(gpus: Client) -> None:
    import cupy

    a = whole(N, N)
    stream = cupy.cuda.Stream(non_blocking=True)
    A, out = cupy.zeros((N, N), "f4"), cupy.zeros((N, N), "f4")
    cupy.cuda.Device().synchronize()
    host = cupy.cuda.alloc_pinned_memory(a.nbytes)
    staged = np.ndarray(a.shape, a.dtype, host)
    staged[:] = a
    with stream:
        slow(stream, cupy)
        A.set(staged, stream=stream)
        out.fill(7)
        distmm.matmul(A, A, out=out)
        after = out + 1
    stream.synchronize()
    np.testing.assert_array_equal(after.get(), a @ a + 1)


def test_work_of_pytorch_is_waited_for_and_sees_the_product(gpus: Client) -> None:
    torch = pytest.importorskip("torch")
    a = torch.from_numpy(whole(N, N)).cuda()
    x = torch.ones((8192, 8192), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        A, out = torch.zeros_like(a), torch.zeros_like(a)
        for _ in range(10):
            x = (x @ x) / 8192
        A.copy_(a)
        out.fill_(7)
        distmm.matmul(A, A, out=out)
        after = out + 1
        torch.cuda.current_stream().synchronize()
    assert torch.equal(after.cpu(), torch.from_numpy(whole(N, N) @ whole(N, N)) + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_tensors_give_tensors_on_their_device(gpus: Client, dtype: str, device: str) -> None:
    torch = pytest.importorskip("torch")
    a = torch.from_numpy(np.sign(whole(1500, 1500))).to(device).to(getattr(torch, dtype))
    identity = torch.eye(1500, dtype=a.dtype, device=device)
    for value in (distmm.matmul(a, identity).compute(), distmm.matmul(a, identity).persist().compute()):
        assert isinstance(value, torch.Tensor)
        assert (value.dtype, value.device) == (a.dtype, a.device)
        assert torch.equal(value, a)
    out = torch.empty_like(a)
    assert distmm.matmul(a, identity, out=out) is out
    assert torch.equal(out, a)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_contractions_of_tensors_give_tensors(gpus: Client, device: str) -> None:
    torch = pytest.importorskip("torch")
    a = torch.from_numpy(whole(30, 40, 50)).to(device)
    for labels in ("ijk,ljk->il", "ijk,ijl->ikl", "ijk->kj"):
        value = distmm.einsum(labels, *[a] * (labels.count(",") + 1)).compute()
        assert (value.dtype, value.device) == (a.dtype, a.device)
        assert torch.equal(value, torch.einsum(labels, *[a] * (labels.count(",") + 1)))


def test_tensors_without_a_cluster_give_tensors() -> None:
    torch = pytest.importorskip("torch")
    a = torch.from_numpy(whole(300, 300)).cuda()
    value = distmm.matmul(a, a).compute(scheduler="threads")
    assert value.device == a.device
    assert torch.equal(value.cpu(), torch.from_numpy(whole(300, 300) @ whole(300, 300)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8"])
def test_a_product_without_a_cluster_reads_its_operands_as_they_are_now(dtype: str, transposed: bool) -> None:
    import cupy

    a, out = cupy.asarray(whole(1200, 1200).astype(dtype)), cupy.empty((1200, 1200), dtype)
    for _ in range(3):
        distmm.matmul(a.T if transposed else a, a, out=out)
        lazy = distmm.gemm(1, a, a, transa=transposed).compute(scheduler="threads")
        expected = (a.T if transposed else a) @ a
        cupy.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)
        cupy.testing.assert_allclose(lazy, expected, rtol=1e-3, atol=1e-3)
        a *= 2


def test_arrays_of_jax_give_arrays_of_jax(gpus: Client) -> None:
    jax = pytest.importorskip("jax")
    for dtype in ("float32", "bfloat16"):
        a = jax.numpy.asarray(np.sign(whole(N, N))).astype(dtype)
        value = distmm.matmul(a, jax.numpy.eye(N, dtype=dtype)).compute()
        assert isinstance(value, jax.Array)
        assert (value == a).all()
    with pytest.raises(InputError, match=r"out is an array of JAX, which is read-only"):
        distmm.matmul(a, a, out=a)


def test_arrays_of_numba_are_read_and_filled(gpus: Client) -> None:
    from numba import cuda

    a, out = cuda.to_device(whole(N, N)), cuda.to_device(np.zeros((N, N), "f4"))
    assert distmm.matmul(a, a, out=out) is out
    np.testing.assert_array_equal(out.copy_to_host(), whole(N, N) @ whole(N, N))


def test_memory_without_a_handle_is_read_and_filled(gpus: Client) -> None:
    import cupy

    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        A, out = cupy.asarray(whole(N, N)), cupy.zeros((N, N), "f4")
    distmm.matmul(A, A, out=out)
    np.testing.assert_array_equal(out.get(), whole(N, N) @ whole(N, N))


def test_workers_that_do_not_reach_the_gpu_get_arrays_through_the_host(
    gpus: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import cupy

    monkeypatch.setattr(lending.gpu_allocations, "secret", lambda _: (None, 0, b""))
    lending.forget_reach(gpus)
    A, out = cupy.asarray(whole(N, N)), cupy.zeros((N, N), "f4")
    for _ in range(2):
        distmm.matmul(A, A, out=out)
        np.testing.assert_array_equal(out.get(), whole(N, N) @ whole(N, N))
    assert isinstance(distmm.matmul(A, A).compute(), cupy.ndarray)
    assert caplog.text.count("go through host memory") == 1
    lending.forget_reach(gpus)


def test_an_out_that_shares_gpu_memory_with_an_operand_is_refused(gpus: Client) -> None:
    import cupy

    x = cupy.zeros((2 * N, N), "f4")
    with pytest.raises(InputError, match="out shares memory with A"):
        distmm.matmul(x[:N], x[N:], out=x[1 : N + 1])
    out = x[N:]
    out[...] = cupy.asarray(whole(N, N))
    distmm.gemm(1, cupy.eye(N, dtype="f4"), cupy.eye(N, dtype="f4"), 2, out, out=out)
    np.testing.assert_array_equal(out.get(), np.eye(N) + 2 * whole(N, N))

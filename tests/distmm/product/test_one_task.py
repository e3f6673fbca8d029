"""A product of one block is one task, which reads its operands and writes C; without a client it is a call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dask
import dask.array as da
import numpy as np
import pytest
from dask.callbacks import Callback
from distributed import Client, LocalCluster, core, wait

import distmm
from distmm.clusters import cluster, view
from distmm.errors import InputError
from distmm.product import request
from distmm.worker.tasks import products
from tests import forked
from tests.distmm.product.small_products import PRODUCTS, A, B, N, Z, whole
from tests.until import until


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tasks of the graphs that are sent in one piece."""
    sent: list[int] = []
    get = Client.get

    def noted(self: Client, dsk: Any, keys: Any, **how: Any) -> Any:
        sent.append(len(dsk))
        return get(self, dsk, keys, **how)

    monkeypatch.setattr(Client, "get", noted)
    return sent


@pytest.mark.parametrize("name", PRODUCTS)
def test_it_is_what_numpy_makes_on_a_cluster(client: Client, name: str) -> None:
    multiply, expected = PRODUCTS[name]
    out = np.full(expected.shape, 7, expected.dtype)
    assert multiply(client=client, out=out) is out
    np.testing.assert_array_equal(out, expected)
    with client.as_current():
        np.testing.assert_array_equal(multiply().compute(), expected)


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_it_has_the_bits_of_the_graph_without_a_client(name: str, scheduler: str) -> None:
    multiply, expected = PRODUCTS[name]
    out = np.full(expected.shape, 7, expected.dtype)
    with dask.config.set(scheduler=scheduler):
        C = multiply()
        multiply(out=out)
        made = C.compute()
    assert type(made) is np.ndarray
    assert made.flags.writeable
    assert not np.may_share_memory(made, A)
    for each in (made, out, C.compute(scheduler="threads")):
        np.testing.assert_array_equal(each, expected)


def test_loads_and_stores_are_in_the_task(client: Client, graphs: list[int]) -> None:
    out = np.empty((N, N))
    distmm.matmul(A, B, out=out, client=client)
    distmm.gemm(1, A, B, 2, A, out=out, client=client)
    distmm.gram(A, out=out, client=client)
    assert graphs == [1, 1, 1]


def test_a_persisted_operand_is_read_where_it_is(client: Client, graphs: list[int]) -> None:
    with client.as_current():
        a = da.from_array(A, chunks=-1).persist()
        np.testing.assert_array_equal(distmm.matmul(a, B).compute(), A @ B)
        np.testing.assert_array_equal(distmm.matmul(a, a).compute(), A @ A)
    assert graphs == [2, 2]  # the persisted chunk, and the product


@pytest.mark.parametrize("chunks", [(N // 2, N), (N, N // 3), (N // 4, N // 2), (5, 7)])
def test_a_persisted_operand_of_several_chunks_meets_one_of_this_process(client: Client, chunks: Any) -> None:
    with client.as_current():
        a = da.from_array(A, chunks=chunks).persist()
        made = [distmm.matmul(a, B), distmm.matmul(B, a), distmm.gemm(2, B, a, 3, a, transa=True, transb=True)]
        for C, expected in zip(made, [A @ B, B @ A, 2 * B.T @ A.T + 3 * A], strict=True):
            np.testing.assert_array_equal(C.compute(), expected)
        np.testing.assert_array_equal(distmm.gram(a, beta=2, C=A + A.T).compute(), A @ A.T + 2 * (A + A.T))


def test_a_vector_times_a_stack_fills_out(client: Client) -> None:
    v, stack = np.arange(20.0), np.random.default_rng(4).integers(-9, 10, (3, 20, 20)).astype("f8")
    for a, b in ((v, stack), (stack, v)):
        out = np.zeros((3, 20))
        distmm.matmul(a, b, out=out, client=client)
        np.testing.assert_array_equal(out, a @ b)


def test_the_old_c_counts_where_it_is_also_out(client: Client) -> None:
    for where in (client, None):
        C = A.copy()
        assert distmm.gemm(1, A, B, 2, C, out=C, client=where) is C
        np.testing.assert_array_equal(C, A @ B + 2 * A)


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sent: list[str] = []
    real = core.send_recv

    async def noted(comm: Any, *, op: str, **message: Any) -> Any:
        if op == "run_function":
            sent.append(op)
        return await real(comm, op=op, **message)

    monkeypatch.setattr(core, "send_recv", noted)
    monkeypatch.setattr(view, "FRESH_SECONDS", 1000.0)
    return sent


def test_the_cluster_is_asked_nothing_before_it_unless_it_needs_much_of_the_memory(
    client: Client, questions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = np.empty((N, N))
    distmm.matmul(A, B, out=out, client=client)
    questions.clear()
    for _ in range(3):
        distmm.matmul(A, B, out=out, client=client)
    assert questions == []
    with client.as_current():
        x = da.from_array(A, chunks=N // 2).persist()
        wait(x)
    distmm.matmul(x, x, client=client)  # asks where x is
    questions.clear()
    for _ in range(3):
        distmm.matmul(x, x, client=client).sum().compute(scheduler=client)
    assert questions == []
    monkeypatch.setattr(request, "SMALL_SHARE", 0.0)
    distmm.matmul(A, B, out=out, client=client)
    assert questions == ["run_function"]


def test_the_cluster_is_asked_again_after_some_seconds(
    client: Client, questions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = np.empty((N, N))
    distmm.matmul(A, B, out=out, client=client)
    monkeypatch.setattr(view, "FRESH_SECONDS", 0.0)
    questions.clear()
    distmm.matmul(A, B, out=out, client=client)
    assert questions


def test_threads_multiply_at_once(client: Client) -> None:
    def multiply(seed: int) -> None:
        a, out = whole(N, N, seed=seed), np.empty((N, N))
        for where in (client, None):
            distmm.matmul(a, B, out=out, client=where)
            np.testing.assert_array_equal(out, a @ B)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(multiply, range(12)))


class _Observer(Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Any] = []

    def _posttask(self, key: Any, *_: Any) -> None:
        self.keys.append(key)


def test_observers_of_dasks_tasks_see_it() -> None:
    with _Observer() as seen:
        np.testing.assert_array_equal(distmm.matmul(A, B).compute(), A @ B)
    assert seen.keys


def test_other_schedulers_compute_it() -> None:
    ran: list[int] = []

    def get(dsk: Any, keys: Any, **how: Any) -> Any:
        ran.append(threading.get_ident())
        return dask.threaded.get(dsk, keys, **how)

    with dask.config.set(scheduler=get):
        np.testing.assert_array_equal(distmm.matmul(A, B).compute(), A @ B)
        distmm.matmul(A, B, out=np.empty((N, N)))
    assert len(ran) >= 2


def test_operands_are_read_when_it_is_computed() -> None:
    a = A.copy()
    C = distmm.matmul(a, B)
    a[:] = 0
    np.testing.assert_array_equal(C.compute(), np.zeros((N, N)))


@pytest.fixture
def annotated() -> Iterator[None]:
    with dask.annotate(workers=["nobody"], allow_other_workers=False):
        yield


@pytest.mark.usefixtures("annotated")
def test_restrictions_that_no_worker_meets_are_an_error(client: Client) -> None:
    with pytest.raises(Exception, match="nobody"):
        distmm.matmul(A, B, out=np.empty((N, N)), client=client)


def test_old_answers_are_those_of_the_present_workers() -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as there,
    ):
        assert distmm.plan(A, B, client=there).cluster.workers == 1
        cluster.scale(2)
        there.wait_for_workers(2)
        until(lambda: len(view.hosts_of(there)) == 2)
        assert distmm.plan(A, B, client=there).cluster.workers == 2


@pytest.mark.minutes
def test_it_is_computed_again_if_its_worker_dies(tmp_path: Path) -> None:
    def die_once() -> None:
        multiply = products.multiply

        def dying(*args: Any, **how: Any) -> Any:
            block = multiply(*args, **how)
            with suppress(FileExistsError):
                (tmp_path / "died").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            return block

        products.multiply = dying

    c = whole(N, N, seed=2)
    out = c.copy()
    with (
        forked.workers(),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as there,
    ):
        there.run(die_once)
        distmm.gemm(2, A, B, 3, out, out=out, client=there)
    assert (tmp_path / "died").exists()
    np.testing.assert_array_equal(out, 2 * A @ B + 3 * c)


class _ByRegions:
    """An object without chunks that takes one range of a step of 1 for each dimension."""

    shape, dtype, ndim = (N, N), np.dtype("f8"), 2

    def __init__(self) -> None:
        self.elements = np.empty(self.shape)

    def __setitem__(self, index: tuple[slice, ...], block: np.ndarray) -> None:
        assert [type(part) for part in index] == [slice, slice]
        self.elements[index] = block

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.elements[index]


def test_an_array_like_object_gets_its_region() -> None:
    out = _ByRegions()
    assert distmm.matmul(A, B, out=out) is out
    np.testing.assert_array_equal(out.elements, A @ B)


@pytest.mark.gpu
def test_arrays_on_a_gpu_are_multiplied_at_once_without_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")

    def by_dask(*args: Any, **how: Any) -> None:
        raise AssertionError("Dask computes")

    monkeypatch.setattr(dask.threaded, "get", by_dask)
    a, b, z, c = map(cupy.asarray, (A, B, Z, np.empty_like(A)))
    tensor = cupy.asarray(np.stack([A, B]))
    for got, expected in (
        (distmm.matmul(a, b).compute(), A @ B),
        (distmm.gemm(2, a, b, 3, a, transa=True, transb=True).compute(), 2 * A.T @ B.T + 3 * A),
        (distmm.gram(z).compute(), Z @ Z.conj().T),
        (distmm.matmul(a[::2, ::3], b[::-3], out=c[:24]), A[::2, ::3] @ B[::-3]),
        (distmm.einsum("aij,ajk->ki", tensor, tensor).compute(), (A @ A + B @ B).T),
        (distmm.tensordot(tensor, tensor, ((0, 2), (0, 1))).compute(), A @ A + B @ B),
    ):
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_array_equal(got.get(), expected)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:  # the caller's work is waited for, and its stream sees the product
        x = cupy.ones((8192, 8192), "f4")
        for _ in range(10):
            x = x @ x / 8192
        assert (distmm.matmul(x, x).compute() == 8192).all()
    with cupy.cuda.Device(cupy.cuda.runtime.getDeviceCount() - 1):
        elsewhere = cupy.empty(A.shape, A.dtype)
    np.testing.assert_array_equal(distmm.matmul(a, b, out=elsewhere).get(), A @ B)


@pytest.mark.parametrize("n", [64, 700, 1024])
def test_a_short_product_of_numpy_arrays_is_one_call_whatever_the_number_of_cores(
    monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda *_, **__: 64)
    monkeypatch.setattr(cluster, "_this_process", cluster._this_process.__wrapped__)
    a = np.ones((n, n), "f4")
    assert distmm.plan(a, a).cluster.threads == 64
    assert distmm.matmul(a, a).numblocks == (1, 1)


def test_a_short_product_of_a_described_cluster_is_planned_for_all_its_workers() -> None:
    a = np.ones((1024, 1024))
    assert distmm.plan(a, a, cluster=distmm.cpus(4, memory="64GB")).blocking.whole.c_blocks == 4


@pytest.mark.parametrize("layout", ["C", "F", "strided"])
@pytest.mark.parametrize("beta", [0, 2])
def test_the_call_writes_to_an_out_of_any_layout(layout: str, beta: int) -> None:
    out = np.zeros((2 * N, 3 * N))[::2, 1::3] if layout == "strided" else np.zeros((N, N), order=layout)  # type: ignore[call-overload]
    out[...] = Z.real - 3
    before = out.copy()
    assert distmm.gemm(3, A, B, beta, out, out=out) is out
    np.testing.assert_array_equal(out, 3 * A @ B + beta * before)


def test_the_call_keeps_the_upper_half_of_a_hermitian_addend_that_is_out() -> None:
    C = whole(N, N, seed=5)
    lower = np.tril(C) + np.tril(C, -1).T
    assert distmm.gram(A, beta=2, C=C, out=C) is C
    np.testing.assert_array_equal(C, A @ A.T + 2 * lower)


def test_equal_products_of_arrays_in_memory_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Mock(side_effect=request.make_plan)
    monkeypatch.setattr(request, "make_plan", planned)
    monkeypatch.setattr(request, "_plans", {})
    for a, b in ((A, B), (B, A), (A.T, B)):
        distmm.matmul(a, b).compute()
    assert planned.call_count == 1
    distmm.matmul(A.astype("f4"), B.astype("f4")).compute()
    distmm.matmul(A, B, blocks=[16, 48, 16]).compute()
    with pytest.raises(InputError, match="three positive edges"):
        distmm.matmul(A, B, blocks="[16, 48, 16]")
    assert planned.call_count == 3

"""Dask's products with `accelerate` on have the values, types and chunks of Dask's own, and stay lazy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import distmm
from distmm.accelerate import functions
from tests.tables import later
from tests.until import until

rng = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def any_size() -> Iterator[None]:
    with dask.config.set({"distmm.accelerate.min-flops": 0}):
        yield


def array(shape: tuple[int, ...], chunks: Any, dtype: str = "f8") -> da.Array:
    """Small whole numbers, whose products every BLAS adds exactly."""
    values = rng.integers(-8, 8, shape)
    return da.from_array((values + 1j * values[::-1]).astype(dtype) if dtype == "c16" else values.astype(dtype), chunks)


def on_distmm(*arrays: da.Array) -> bool:
    """Whether one of these is made of distmm's tasks."""
    return any(layer.startswith(("distmm-matmul", "stack_factors")) for each in arrays for layer in each.dask.layers)


A, B, V, T = array((60, 40), (16, 12)), array((40, 30), (10, 10)), array((40,), 9), array((6, 40, 8), (3, 12, 5))
COMPLEX = array((20, 9), (7, 4), "c16")


def large_factors(qr: Callable[[da.Array], Any]) -> Any:
    """Decompose blocks of 4 rows and 3 columns where Dask's chunks have at most 100 bytes."""
    with dask.config.set({"array.chunk-size": "100B"}):
        return qr(A[:12, :3].rechunk((4, 3)))


PRODUCTS: dict[str, Callable[[], da.Array]] = {
    "matrices": lambda: A @ B,
    "chunks of k that differ": lambda: da.matmul(A, B.rechunk(17)),
    "float32": lambda: A.astype("f4") @ B.astype("f4"),
    "float32 by float64": lambda: A.astype("f4") @ B,
    "float16": lambda: A.astype("f2") @ B.astype("f2"),
    "complex": lambda: COMPLEX @ COMPLEX.T.rechunk(6),
    "64-bit integers": lambda: A.astype("i8") @ B.astype("u4"),
    "a matrix and a vector": lambda: A @ V,
    "a vector and a matrix": lambda: V @ B,
    "two vectors": lambda: V @ V,
    "a NumPy array on the left": lambda: np.ones((5, 60)) @ A,
    "a NumPy array on the right": lambda: A @ np.ones((40, 5)),
    "a stack and a matrix": lambda: T.transpose(0, 2, 1) @ B,
    "stacks": lambda: da.matmul(T, T.transpose(0, 2, 1)),
    "broadcast stacks": lambda: da.matmul(T, T[:1].transpose(0, 2, 1)),
    "NumPy's function": lambda: np.matmul(A, B),
    "the method dot": lambda: A.dot(B),
    "dot of a transpose": lambda: A.T.dot(A),
    "dot": lambda: da.dot(A, V),
    "vdot": lambda: da.vdot(A, A),
    "tensordot over one dimension": lambda: da.tensordot(A, T, axes=(1, 1)),
    "tensordot over two dimensions": lambda: da.tensordot(T, T, axes=((0, 1), (0, 1))),
    "tensordot by a number": lambda: da.tensordot(A, B, axes=1),
    "tensordot over a negative dimension": lambda: np.tensordot(A, B, axes=(-1, 0)),
    "einsum of matrices": lambda: da.einsum("ij,jk->ki", A, B),
    "einsum without a result": lambda: da.einsum("ij,jk", A, B),
    "einsum by numbers": lambda: da.einsum(A, [0, 1], B, [1, 2], [2, 0]),
    "einsum of a matrix and a vector": lambda: da.einsum("ij,j", A, V),
    "einsum of a stack": lambda: da.einsum("bij,bik->bjk", T, T),
    "einsum with an ellipsis": lambda: da.einsum("...ij,ik->...jk", T, A.T),
}


@pytest.mark.usefixtures("blocks_are_chunks")
@pytest.mark.parametrize("product", later(PRODUCTS, first=12))
def test_products_have_the_values_types_and_chunks_of_dasks(product: str) -> None:
    expected = PRODUCTS[product]()
    with distmm.accelerated():
        found = PRODUCTS[product]()
    assert on_distmm(found)
    assert not on_distmm(expected)
    assert (found.dtype, found.chunks) == (expected.dtype, expected.chunks)
    assert type(found) is da.Array
    with dask.config.set(scheduler="sync"):
        x, y = dask.compute(found, expected)
    assert (type(x), x.dtype) == (type(y), y.dtype) or product == "two vectors"  # a scalar, as NumPy's
    np.testing.assert_array_equal(x, y)


STAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "bool": (lambda: (A > 0) @ (B > 0), "bool becomes a wider type"),
    "small integers": (lambda: A.astype("i4").dot(B.astype("i4")), "int32 becomes a wider type"),
    "objects": (lambda: A.astype(object) @ B.astype(object), "object"),
    "masked arrays": (lambda: da.ma.masked_less(A, 0).dot(B), "MaskedArray"),
    "unknown chunks": (lambda: A[A[:, 0] > 0] @ B, "unknown"),
    "unknown chunks of a stack": (lambda: da.matmul(T[T[:, 0, 0] > 0], T[:1].transpose(0, 2, 1)), "unknown"),
    "no rows": (lambda: A[:0] @ B, "no elements"),
    "no k": (lambda: A[:, :0] @ B[:0], "no elements"),
    "empty chunks": (lambda: da.from_array(np.ones((4, 40)), chunks=((0, 4), 40)) @ B, "no elements"),
    "an outer product": (lambda: da.tensordot(V, V, axes=0), "nothing is summed over"),
    "einsum of one operand": (lambda: da.einsum("ij->i", A), "1 operands"),
    "einsum of three operands": (lambda: da.einsum("ij,jk,k", A, B, B[0]), "3 operands"),
    "einsum in another type": (lambda: da.einsum("ij,jk", A, B, dtype="f4"), "options"),
    "einsum of a diagonal": (lambda: da.einsum("ii,ij->j", A[:40], A[:40]), "twice"),
    "einsum with a sum of one operand": (lambda: da.einsum("ij,jk->k", A, B), "summed over"),
    "einsum that Dask cuts": (lambda: da.einsum("ij,jk", A[:, :2], B[:2]), "smaller chunks"),
    "stacks cut differently": (lambda: da.matmul(T, T.transpose(0, 2, 1).rechunk({0: 6})), "different chunks"),
    "a QR with large factors": (lambda: large_factors(da.linalg.tsqr)[1], "a task would read 216 bytes"),
    "a QR of blocks that are not tall": (lambda: da.linalg.tsqr(A.rechunk((16, -1)))[1], "not taller than 40"),
    "a QR of integers": (lambda: da.linalg.tsqr(A[:, :3].rechunk((16, 3)).astype("i8"))[1], "LAPACK has no int64"),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_distmm_does_not_take_stays_dasks(case: str, caplog: pytest.LogCaptureFixture) -> None:
    function, reason = STAYS[case]
    expected = function()
    with distmm.accelerated(), caplog.at_level(logging.DEBUG, "distmm.accelerate"):
        found = function()
    assert found.name == expected.name
    assert any("stays Dask's" in message and reason in message for message in caplog.messages), caplog.messages


@pytest.mark.parametrize(
    ("package", "least", "columns", "ours"),
    [("cupy", 500, 6, False), ("cupy", 20, 6, True), ("cupy", 20, 3, False), ("numpy", 500, 6, True)],
)
def test_on_gpus_batches_of_short_tasks_stay_dasks(
    package: str, least: int, columns: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of C has 2880 operations; a chunk of six columns has 2 x 5 x 8 x 6 = 480, and of three columns 240."""
    monkeypatch.setattr(functions, "package_of", lambda meta: package)
    stack, other = array((6, 5, 8), (1, 5, 8)), array((6, 8, 6), (1, 8, columns))
    with dask.config.set({"distmm.accelerate.min-flops": least}), distmm.accelerated():
        assert on_distmm(stack @ other) == ours
        assert on_distmm(stack.rechunk((1, 5, 4)) @ other.rechunk((1, 4, 6)))  # k has two chunks


def test_equations_in_float32_are_solved_although_dask_factors_them_with_float64_zeros() -> None:
    matrix, right = array((6, 6), 2, "f4") + 50 * da.eye(6, chunks=2, dtype="f4"), array((6,), 2, "f4")
    expected = da.linalg.solve(matrix, right).compute()
    with distmm.accelerated():
        found = da.linalg.solve(matrix, right)
    assert on_distmm(found)
    np.testing.assert_allclose(found.compute(), expected, rtol=1e-5)


def test_errors_are_dasks() -> None:
    def message(function: Callable[[], Any]) -> tuple[type, str]:
        with pytest.raises((ValueError, TypeError)) as error:
            function()
        assert error.value.__context__ is None
        return error.type, str(error.value)

    for function in (
        lambda: A @ A,
        lambda: da.matmul(A, 3),
        lambda: da.matmul(T, T[:2].transpose(0, 2, 1)),
        lambda: da.tensordot(A, A, axes=1),
        lambda: da.einsum("ij,jk->x", A, B),
        lambda: da.linalg.tsqr(A),
    ):
        expected = message(function)
        with distmm.accelerated():
            assert message(function) == expected


def test_small_products_stay_dasks_by_their_operations() -> None:
    with distmm.accelerated():
        with dask.config.set({"distmm.accelerate.min-flops": 2 * 60 * 40 * 30}):
            assert on_distmm(A @ B, A.dot(B), da.einsum("ij,jk", A, B))
        with dask.config.set({"distmm.accelerate.min-flops": 2 * 60 * 40 * 30 + 1}):
            assert not on_distmm(A @ B, A.dot(B), da.einsum("ij,jk", A, B))


def test_a_product_has_the_same_name_each_time() -> None:
    with distmm.accelerated():
        assert (A @ B).name == (A @ B).name
        assert (A @ B).name != (A @ B[:, ::-1]).name


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")  # by Dask, for the type of singular values
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
@pytest.mark.parametrize("rows", [20, (7, 30, 7, 6), 50])
def test_a_tall_qr_is_a_qr_in_the_chunks_of_dasks(dtype: str, rows: Any) -> None:
    values = rng.standard_normal((50, 5)) + (1j * rng.standard_normal((50, 5)) if dtype == "c16" else 0)
    tall = da.from_array(values.astype(dtype), chunks=(rows, 5))
    theirs = da.linalg.tsqr(tall), da.linalg.tsqr(tall, compute_svd=True)
    with distmm.accelerated():
        ours = da.linalg.tsqr(tall), da.linalg.tsqr(tall, compute_svd=True)
    for x, y in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        assert (x.chunks, x.dtype) == (y.chunks, y.dtype)
    assert on_distmm(*ours[0])
    (q, r), (u, s, vh), (_, s_dask, _) = dask.compute(*ours, theirs[1])
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == "f4" else {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(q @ r, values.astype(dtype), **close)
    np.testing.assert_allclose(q.conj().T @ q, np.eye(5), **close)
    np.testing.assert_array_equal(r, np.triu(r))
    np.testing.assert_allclose((u * s) @ vh, values.astype(dtype), **close)
    np.testing.assert_allclose(s, s_dask, **close)


@pytest.mark.parametrize("iterator", ["power", "QR"])
def test_a_compressed_svd_finds_what_dasks_does(iterator: str) -> None:
    spectrum = 2.0 ** -np.arange(30)
    left, right = (np.linalg.qr(rng.standard_normal((n, 30)))[0] for n in (320, 40))
    matrix = da.from_array((left * spectrum) @ right.T, chunks=(40, 10))
    more = {"n_power_iter": 1, "iterator": iterator, "seed": 5}
    theirs = da.linalg.svd_compressed(matrix, 4, **more)
    with distmm.accelerated():
        ours = da.linalg.svd_compressed(matrix, 4, **more)
    assert on_distmm(*ours)
    assert [x.chunks for x in ours] == [x.chunks for x in theirs]
    for x, y in zip(dask.compute(*ours), dask.compute(*theirs), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-9)


@pytest.mark.usefixtures("blocks_are_chunks")
def test_with_a_client_products_are_planned_for_its_cluster_and_run_there(client: Client) -> None:
    with client.as_current(), distmm.accelerated():
        c = A @ B
        q, r = da.linalg.tsqr(A[:, :3].rechunk((20, 3)))
        assert c.dask.layers[c.name].plan.cluster.workers == 4
        values = dask.compute(c, A.dot(B) @ np.ones(30), q @ r)
    np.testing.assert_array_equal(values[0], A.compute() @ B.compute())
    np.testing.assert_array_equal(values[1], values[0] @ np.ones(30))
    np.testing.assert_allclose(values[2], A[:, :3].compute(), atol=1e-12)
    until(
        lambda: not client.run_on_scheduler(lambda dask_scheduler: [k for k in dask_scheduler.tasks if "qr" in str(k)])
    )


def test_products_for_which_the_cluster_has_too_little_memory_stay_dasks(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    huge = da.zeros((10**6, 10**6), chunks=200_000)
    with client.as_current(), distmm.accelerated(), caplog.at_level(logging.DEBUG, "distmm.accelerate"):
        c = huge @ huge
    assert c.name.partition("-")[0] != "distmm"
    assert any("matmul stays Dask's" in message and "GB" in message for message in caplog.messages)


@pytest.mark.gpu
def test_products_of_cupy_blocks_stay_on_the_gpu() -> None:
    import cupy

    a, b = A.map_blocks(cupy.asarray), B.map_blocks(cupy.asarray)
    with distmm.accelerated():
        c = a @ b
        q, r = da.linalg.tsqr(a[:, :3].rechunk((20, 3)))
        found = q @ r
    assert on_distmm(c)
    assert isinstance(c.compute(), cupy.ndarray)
    np.testing.assert_array_equal(c.compute().get(), A.compute() @ B.compute())
    np.testing.assert_allclose(found.compute().get(), A[:, :3].compute(), atol=1e-12)


MULTIPLIED: dict[str, Callable[[da.Array, da.Array], da.Array]] = {
    "matmul": lambda a, b: a @ b,
    "einsum": lambda a, b: da.einsum("ij,jk->ki", a, b),
}


@pytest.mark.parametrize("product", later(MULTIPLIED))
def test_a_product_that_does_not_fit_stays_dasks_and_can_be_kept(
    client: Client, memory: Callable[[int], None], caplog: pytest.LogCaptureFixture, product: str
) -> None:
    a, b = array((160, 20), 20), array((20, 160), 20)
    expected = MULTIPLIED[product](a, b)
    memory(expected.nbytes // 4 - 1)  # of each of the four workers
    with client.as_current():
        with distmm.accelerated(), caplog.at_level(logging.DEBUG, "distmm.accelerate"):
            c = MULTIPLIED[product](a, b)
        assert "too little memory for all blocks" in caplog.text
        np.testing.assert_array_equal(c.persist().compute(), expected.compute(scheduler="sync"))


def test_a_product_that_fits_runs_on_distmm_where_its_operand_does_not_fit(
    client: Client, memory: Callable[[int], None]
) -> None:
    a, b = array((160, 20), 20), array((20, 160), 20)
    with client.as_current():
        memory(160 * 160 * 8 // 4 - 1)
        does_not_fit = distmm.matmul(a, b)
        memory(10**9)
        with distmm.accelerated():
            c = does_not_fit @ array((160, 20), 20)
        assert does_not_fit.dask.layers[does_not_fit.name].plan.streamed
        assert c.name.startswith("distmm-matmul")

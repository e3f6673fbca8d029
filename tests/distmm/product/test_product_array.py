"""`compute` of a product fills an array of this process, and is Dask's own wherever that cannot be."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import psutil
import pytest
from dask.callbacks import Callback
from distributed import Client, get_client

import distmm
from distmm.product import product_array
from distmm.product.product_array import ProductArray
from distmm.transfer import lending
from tests.tables import later
from tests.until import until

N = 400  # float64 matrices of this size have more bytes than `lending.SMALLEST`


@pytest.fixture(autouse=True)
def current(client: Client) -> Iterator[None]:
    with client.as_current():
        yield


@pytest.fixture
def by_dask(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is computed in Dask's way."""
    found: list[Any] = []
    get = Client.get

    def noted(self: Client, dsk: Any, keys: Any, **how: Any) -> Any:
        if how.get("sync", True):  # Dask fetches the result
            found.append(keys)
        return get(self, dsk, keys, **how)

    monkeypatch.setattr(Client, "get", noted)
    return found


def whole(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 9, shape).astype("f8")


A, B = whole(N, N), whole(N, N, seed=1)

PRODUCTS: dict[str, tuple[Callable[[], da.Array], Callable[[], np.ndarray]]] = {
    "matmul": (lambda: distmm.matmul(A, B), lambda: A @ B),
    "stack": (lambda: distmm.matmul(A, np.stack([B, B.T])), lambda: A @ np.stack([B, B.T])),
    "gemm": (lambda: distmm.gemm(2, A, B, 3, A, transa=True), lambda: 2 * A.T @ B + 3 * A),
    "gram": (lambda: distmm.gram(A + 1j * B), lambda: (A + 1j * B) @ (A + 1j * B).conj().T),
    "Dask arrays": (lambda: distmm.matmul(da.from_array(A, 150), B), lambda: A @ B),
    "a plan": (lambda: distmm.matmul(A, B, plan="g2x2x1 b200x100x200 p1 w1 l2"), lambda: A @ B),
    "tensordot": (lambda: distmm.tensordot(A, B, ([0], [1])), lambda: A.T @ B.T),
}


@pytest.mark.parametrize("name", later(PRODUCTS, first=4))
def test_blocks_come_to_an_array_of_this_process(by_dask: list[Any], name: str) -> None:
    make, expected = PRODUCTS[name]
    C = make().compute()
    assert (type(C), C.dtype, C.flags.owndata, C.flags.writeable) == (np.ndarray, expected().dtype, True, True)
    np.testing.assert_array_equal(C, expected())
    assert not by_dask


def test_types_of_other_packages_come_too(by_dask: list[Any]) -> None:
    a = np.ones((1024, 64), ml_dtypes.bfloat16)
    C = distmm.matmul(a, a.T).compute()
    assert C.dtype == a.dtype
    assert (C.astype("f4") == 64).all()
    assert not by_dask


def test_a_persisted_product_stays_on_the_workers(client: Client, by_dask: list[Any]) -> None:
    a = A.copy()
    C = distmm.matmul(a, B)
    P = C.persist()
    first = P.compute()
    np.testing.assert_array_equal(first, A @ B)
    first[:], a[:] = 0, 0
    for again in (P, C):  # blocks of C are there, too: nothing is multiplied anew
        np.testing.assert_array_equal(again.compute(), A @ B)
    assert set(map(tuple, P.__dask_graph__())) <= set(client.futures)
    assert not by_dask
    np.testing.assert_array_equal((P + 1).compute(), A @ B + 1)


def test_a_product_that_was_changed_in_place_is_computed_as_it_is_now() -> None:
    C, D = distmm.matmul(A, B), distmm.matmul(A, B)
    C[0] = 1
    np.add(D, 1, out=D)
    expected = A @ B
    np.testing.assert_array_equal(D.compute(), expected + 1)
    expected[0] = 1
    np.testing.assert_array_equal(C.compute(), expected)


def test_an_operand_that_is_changed_in_place_counts_as_it_was_at_the_call(by_dask: list[Any]) -> None:
    a = da.from_array(A, 150)
    C = distmm.matmul(a, B)
    a[0] = 1
    np.testing.assert_array_equal(C.compute(), A @ B)
    assert not by_dask


def test_what_is_made_of_it_is_dasks() -> None:
    C = distmm.matmul(A, B)
    made = [C + 1, C[:5], C.copy(), np.concatenate([C, da.ones_like(C)]), pickle.loads(pickle.dumps(C))]
    assert [type(each) for each in made] == [da.Array] * len(made)
    np.testing.assert_array_equal(made[-1].compute(), A @ B)


def test_numpy_takes_it_as_an_array(by_dask: list[Any]) -> None:
    np.testing.assert_array_equal(np.asarray(distmm.matmul(A, B)), A @ B)
    assert not by_dask


def test_with_arguments_or_beside_others_it_is_computed_by_dask(by_dask: list[Any]) -> None:
    C = distmm.matmul(A, B)
    np.testing.assert_array_equal(C.compute(optimize_graph=False), A @ B)
    product, total = dask.compute(C, C.sum())
    np.testing.assert_array_equal(product, A @ B)
    assert total == (A @ B).sum()
    assert len(by_dask) == 2
    small = distmm.matmul(A[:5], B).compute()
    np.testing.assert_array_equal(small, A[:5] @ B)
    np.testing.assert_array_equal(distmm.matmul(A, B[0]).compute(), A @ B[0])
    assert len(by_dask) == 3  # a small result is fetched


def test_other_schedulers_compute_it() -> None:
    C = distmm.matmul(da.from_array(A, N), da.from_array(B, N))
    with dask.config.set(scheduler="threads"):
        np.testing.assert_array_equal(C.compute(), A @ B)
        P = C.persist()
    np.testing.assert_array_equal(P.compute(), A @ B)


def test_where_workers_do_not_reach_this_process_dask_computes_it(
    by_dask: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "_within_reach", lambda client: False)
    C = distmm.matmul(A, B)
    np.testing.assert_array_equal(C.compute(), A @ B)
    np.testing.assert_array_equal(C.persist().compute(), A @ B)
    assert len(by_dask) == 2


def test_where_this_process_lacks_the_memory_dask_computes_it(
    by_dask: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    C = distmm.matmul(A, B)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": C.nbytes - 1}))
    np.testing.assert_array_equal(C.compute(), A @ B)
    assert len(by_dask) == 1


def test_a_task_computes_it_as_dask_does(client: Client) -> None:
    def nested() -> tuple[bool, np.ndarray]:
        with get_client().as_current():
            C = distmm.matmul(A, B)
            return isinstance(C, ProductArray), C.compute()

    direct, C = client.submit(nested, pure=False).result()
    assert direct
    np.testing.assert_array_equal(C, A @ B)


def test_a_task_multiplies_persisted_arrays_that_are_its_arguments(client: Client) -> None:
    def multiplied(x: da.Array) -> np.ndarray:
        with get_client().as_current():
            return distmm.gram(distmm.matmul(x, x.T)).compute()

    persisted, C = client.persist(da.from_array(A, N)), A @ A.T
    np.testing.assert_array_equal(client.submit(multiplied, persisted).result(), C @ C.T)


def test_an_error_of_a_task_is_raised_and_leaves_nothing(client: Client) -> None:
    def fails(block: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError("a block")

    C = distmm.matmul(da.from_array(A, N).map_blocks(fails, meta=np.empty((0, 0))), B)
    with pytest.raises(ZeroDivisionError, match="a block"):
        C.compute()
    np.testing.assert_array_equal(distmm.matmul(A, B).compute(), A @ B)


CHUNKED = da.from_array(A, (40, 30))  # of so many chunks that a block of C has several
FINE = da.from_array(A, 25)


def keys_of(array: da.Array) -> str:
    return str(list(dict(dask.optimize(array)[0].dask)))


def test_without_a_cluster_blocks_are_computed_in_place_of_the_chunks_that_are_parts_of_them() -> None:
    keys: list[Any] = []
    with dask.config.set(scheduler="threads"), Callback(posttask=lambda key, *_: keys.append(key)):
        C = distmm.matmul(da.from_array(A, 20), da.from_array(B, 20))
        np.testing.assert_array_equal(C.compute(), A @ B)
    assert len(keys) < math.prod(C.numblocks) / 4


def test_blocks_are_reduced_in_place_of_the_chunks_that_are_parts_of_them() -> None:
    C, results, expected = distmm.matmul(CHUNKED, CHUNKED.T), [], []
    assert C.numblocks == (10, 10)
    for name, axis, keepdims in itertools.product(
        ["sum", "mean", "max", "min", "any", "all"], [None, 0, 1, (0, 1)], [False, True]
    ):
        results.append(getattr(C, name)(axis=axis, keepdims=keepdims))
        expected.append(getattr(A @ A.T, name)(axis=axis, keepdims=keepdims))
        by_chunks = getattr(da.Array, name)(C, axis=axis, keepdims=keepdims)
        assert (results[-1].chunks, results[-1].dtype) == (by_chunks.chunks, by_chunks.dtype)
    assert ("-chunks" in keys_of(results[0]), "-chunks" in keys_of(da.sum(C))) == (False, True)
    for found, wanted in zip(dask.compute(*results), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_reduction_joins_the_parts_of_many_blocks_in_a_task(client: Client) -> None:
    X, W = da.from_array(A, (10, N)), da.from_array(B[:, :5], (N, 5))
    C, tall = distmm.matmul(X, W, client=client), A @ B[:, :5]
    assert C.numblocks == (40, 1)
    tasks = keys_of(C.sum())
    assert (tasks.count("sum-partial"), tasks.count("sum-aggregate")) == (3, 1)  # in groups of at most 16
    assert keys_of(C.sum(split_every=2)).count("sum-partial") > 30
    kept = C.persist()
    for array, axis in itertools.product((C, kept), (None, 0, 1)):
        np.testing.assert_array_equal(client.compute(array.sum(axis=axis)).result(), tall.sum(axis=axis))


def test_arguments_of_a_reduction_may_be_given_by_position() -> None:
    C, expected = distmm.matmul(CHUNKED, CHUNKED.T), A @ A.T
    np.testing.assert_array_equal(C.sum(0, None, False, 4).compute(), expected.sum(0))
    np.testing.assert_array_equal(C.max(1, True, 4).compute(), expected.max(1, keepdims=True))


def test_a_product_of_a_vector_is_reduced_by_blocks() -> None:
    v = np.arange(N) % 7.0
    assert distmm.matmul(CHUNKED, v).sum().compute() == (A @ v).sum()
    assert distmm.matmul(v, CHUNKED).max().compute() == (v @ A).max()


def test_a_product_that_was_changed_is_reduced_as_it_is_now() -> None:
    C, expected, total = distmm.matmul(CHUNKED, CHUNKED), A @ A, da.zeros(N)
    C[3] = 7
    expected[3] = 7
    assert C.sum().compute() == expected.sum()
    distmm.matmul(CHUNKED, CHUNKED).sum(axis=0, out=total)
    np.testing.assert_array_equal(total.compute(), (A @ A).sum(axis=0))
    np.testing.assert_array_equal(distmm.matmul(CHUNKED, CHUNKED).persist().max(axis=0).compute(), (A @ A).max(axis=0))


def test_a_sum_reads_the_chunks_that_the_cluster_has() -> None:
    C = distmm.matmul(CHUNKED, CHUNKED)
    kept = C.persist()
    assert "-chunks" in keys_of(C.sum())
    assert C.sum().compute() == kept.sum().compute() == (A @ A).sum()
    del kept
    until(lambda: "-chunks" not in keys_of(C.sum()))  # futures are let go in the client's own thread


def test_a_product_and_its_sum_are_computed_at_once() -> None:
    C = distmm.matmul(CHUNKED, CHUNKED)
    product, total, chunk = dask.compute(C, C.sum(), C[:5].sum())
    np.testing.assert_array_equal(product, A @ A)
    assert (total, chunk) == ((A @ A).sum(), (A @ A)[:5].sum())


PARTS = {
    "a chunk": np.s_[40:80, 80:120],
    "a row": np.s_[-3],
    "a column": np.s_[..., 5],
    "an element": np.s_[7, 9],
    "every third": np.s_[3:50:3, 90:],
}
WHOLE = {
    "backwards": np.s_[::-1],
    "a new axis": np.s_[None, 3],
    "a list": np.s_[[1, 5]],
    "nothing": np.s_[5:5],
    "half": np.s_[: N // 2],
}


@pytest.fixture
def parts_are_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parts of products of any length be products of their own."""
    monkeypatch.setattr(product_array, "WORTH_A_PRODUCT", 0.0)


@pytest.mark.usefixtures("parts_are_products")
@pytest.mark.parametrize("multiply", [distmm.matmul, lambda X, _: distmm.gram(X)], ids=["matmul", "gram"])
@pytest.mark.parametrize("name", [*PARTS, *WHOLE])
def test_chunks_of_a_product_in_larger_blocks_are_a_product_of_their_own(name: str, multiply: Any) -> None:
    index = {**PARTS, **WHOLE}[name]
    C, plain = multiply(FINE, FINE.T), da.from_array(A @ A.T, 25)
    part = C[index]
    assert (C.name in part.dask.layers) == (name in WHOLE)
    assert part.chunks == plain[index].chunks
    made = part.compute()
    assert type(made) is type((A @ A.T)[index])
    np.testing.assert_array_equal(made, (A @ A.T)[index])


def test_a_part_is_a_view_if_the_products_of_its_blocks_are_short() -> None:
    C = distmm.matmul(FINE, FINE)
    assert C.name in C[:25, :25].dask.layers
    np.testing.assert_array_equal(C[:25, :25].compute(), (A @ A)[:25, :25])


@pytest.mark.usefixtures("parts_are_products")
def test_chunks_of_a_batched_product_in_larger_blocks_are_a_product_of_their_own() -> None:
    a = np.stack([A, A + 1, A + 2])
    C = distmm.matmul(da.from_array(a, chunks=(2, 25, 25)), FINE)
    for index in np.s_[2, 40:45, :7], np.s_[:, 12, 3], np.s_[0, -1]:
        part = C[index]
        assert C.name not in part.dask.layers
        np.testing.assert_array_equal(part.compute(), (a @ A)[index])


def test_a_part_of_what_c_is_now_is_no_product_of_its_own(client: Client) -> None:
    C, kept = distmm.matmul(FINE, FINE), distmm.matmul(FINE, FINE)
    C[3] = 7
    expected = A @ A
    expected[3] = 7
    np.testing.assert_array_equal(C[2:5, :4].compute(), expected[2:5, :4])
    of_cluster = kept.persist()
    assert kept.name in kept[:5].dask.layers
    np.testing.assert_array_equal(dask.compute(of_cluster[:5], kept[:5])[1], (A @ A)[:5])


@pytest.mark.usefixtures("parts_are_products")
def test_a_part_of_a_product_whose_client_is_closed_is_read_from_blocks(client: Client) -> None:
    with Client(client.scheduler.address, set_as_default=False) as own:
        C = distmm.matmul(FINE, FINE, client=own)
        assert C.name not in C[:5].dask.layers
    part = C[50:55]
    assert C.name in part.dask.layers
    np.testing.assert_array_equal(part.compute(), (A @ A)[50:55])


def test_parts_of_sums_and_of_hermitian_products_are_read_from_blocks() -> None:
    for C, expected in (
        (distmm.gemm(1, FINE, FINE, 2, A), A @ A + 2 * A),
        (distmm.gram(FINE + 1j * FINE.T), (A + 1j * A.T) @ (A + 1j * A.T).conj().T),
    ):
        assert C.name in C[:5].dask.layers
        np.testing.assert_array_equal(C[:5].compute(), expected[:5])

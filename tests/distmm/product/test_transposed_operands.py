"""Transposes that Dask makes: product tasks transpose blocks themselves, and no two products share a name."""

from __future__ import annotations

from collections.abc import Callable

import dask.array as da
import numpy as np
import pytest
from distributed import Client, futures_of, wait

import distmm
from distmm import clusters
from distmm.graph.block_arrays import transposed

ROWS, WIDTH = 60, 20


@pytest.fixture
def persisted(cluster: Callable[[int], Client]) -> tuple[np.ndarray, da.Array, Client]:
    """A matrix of two workers, persisted in blocks of rows."""
    client = cluster(2)
    x = np.random.default_rng(0).integers(-9, 9, (ROWS, WIDTH)).astype("f8")
    X = client.persist(da.from_array(x, chunks=(10, WIDTH)))
    client.gather(futures_of(X))
    return x, X, client


def names(array: da.Array) -> set[str]:
    """What the tasks of a graph are called."""
    return {str(key[0] if isinstance(key, tuple) else key).rpartition("-")[0] for key in dict(array.dask)}


def test_products_of_a_transpose_have_no_tasks_that_transpose(persisted) -> None:
    x, X, client = persisted
    Z = X - X.mean(axis=0)
    z = x - x.mean(axis=0)
    for lazy, expected in (
        (distmm.matmul(X.T, X, client=client), x.T @ x),
        (distmm.gram(X.T, client=client), x.T @ x),
        (distmm.matmul(X, X.T, client=client), x @ x.T),
        (distmm.matmul(Z.T, Z, client=client), z.T @ z),
        (distmm.matmul((X + 1).T, X, client=client), (x + 1).T @ x),
        (distmm.gemm(2, X, X, transa=True, client=client), 2 * x.T @ x),
        (distmm.gemm(2, X, X, transb=True, client=client), 2 * x @ x.T),
    ):
        assert not {"transpose", "swapaxes"} & names(lazy)
        np.testing.assert_allclose(client.compute(lazy).result(), expected, atol=1e-9)
        with client.as_current():
            np.testing.assert_allclose(lazy.compute(), expected, atol=1e-9)


def test_square_matrices_and_their_transposes_are_not_confused(persisted) -> None:
    _, _, client = persisted
    a = np.random.default_rng(1).integers(-9, 9, (24, 24)).astype("f8")
    A = client.persist(da.from_array(a, chunks=8))
    lazy = {
        "A A": distmm.matmul(A, A, client=client),
        "A' A": distmm.matmul(A.T, A, client=client),
        "A A'": distmm.matmul(A, A.T, client=client),
        "A' A'": distmm.matmul(A.T, A.T, client=client),
    }
    found = dict(zip(lazy, client.gather(client.compute(list(lazy.values()))), strict=True))
    expected = {"A A": a @ a, "A' A": a.T @ a, "A A'": a @ a.T, "A' A'": a.T @ a.T}
    assert len({each.name for each in lazy.values()}) == 4
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_unions_of_chunks_are_transposed_chunk_by_chunk(persisted) -> None:
    _, _, client = persisted
    a, b = (np.random.default_rng(seed).integers(-9, 9, (48, 60)).astype("f8") for seed in (1, 2))
    A, B = (client.persist(da.from_array(each, chunks=(6, 4))) for each in (a, b))
    C = distmm.matmul(A.T, B, client=client)
    assert C.chunks == ((4,) * 15, (4,) * 15)
    np.testing.assert_array_equal(client.compute(C).result(), a.T @ b)


def test_blocks_of_another_shape_are_refused_by_their_shape_in_the_operand(persisted) -> None:
    *_, client = persisted
    wrong = da.map_blocks(
        lambda block: block[:-1], da.ones((20, 4), chunks=(10, 4)), chunks=((10, 10), (4,)), dtype=float
    )
    with pytest.raises(distmm.InputError, match=r"shape \(9, 4\), and its array says \(10, 4\)"):
        client.compute(distmm.matmul(wrong.T, da.ones((20, 3), chunks=(10, 3)), client=client)).result()


def test_only_transposes_of_matrices_are_recognised() -> None:
    X = da.ones((6, 4), chunks=3)
    assert transposed(X.T).name == X.name
    assert transposed(X.T).chunks == X.chunks
    np.testing.assert_array_equal(transposed((X + 1).T).compute(), np.full((6, 4), 2.0))
    for other in (X, da.transpose(X, (0, 1)), X.T + 1, da.ones((2, 3, 4)).T):
        assert transposed(other) is None


@pytest.mark.gpu
def test_products_on_gpus_have_no_tasks_that_transpose() -> None:
    cupy = pytest.importorskip("cupy")
    pytest.importorskip("dask_cuda")
    x, w, a = (
        np.random.default_rng(seed).integers(-9, 9, shape).astype("f4")
        for seed, shape in enumerate([(4096, 300), (4096, 200), (900, 900)])
    )
    with clusters.local("gpu", dashboard=None, quiet=True) as client:

        def persisted(array: np.ndarray, chunks: tuple[int, int]) -> da.Array:
            made = da.from_array(array, chunks=chunks).map_blocks(cupy.asarray, meta=cupy.empty((0, 0), "f4"))
            made = client.persist(made)
            wait(made)
            return made

        X, W, A = persisted(x, (512, 300)), persisted(w, (512, 200)), persisted(a, (300, 300))
        Z, z = X - X.mean(axis=0), x - x.mean(axis=0)
        for lazy, expected in (
            (distmm.matmul(X.T, X, client=client), x.T @ x),
            (distmm.gram(X.T, client=client), x.T @ x),
            (distmm.matmul(X.T, W, client=client), x.T @ w),
            (distmm.matmul((X + 1).T, W, client=client), (x + 1).T @ w),
            (distmm.matmul(Z.T, Z, client=client), z.T @ z),
        ):
            assert "transpose" not in names(lazy)
            found = client.compute(lazy).result()
            assert isinstance(found, cupy.ndarray)
            np.testing.assert_allclose(found.get(), expected, rtol=1e-5, atol=0.5)
        for lazy, expected in (
            (distmm.matmul(A.T, A, blocks=(300, 300, 300), client=client), a.T @ a),
            (distmm.matmul(A, A.T, blocks=(300, 300, 300), client=client), a @ a.T),
            (distmm.matmul(A.T, A.T, blocks=(300, 300, 300), client=client), a.T @ a.T),
            (distmm.matmul(X, X.T, client=client), x @ x.T),
            (distmm.einsum("ij,jk->ki", A, A), (a @ a).T),
        ):
            assert "transpose" not in names(lazy)
            np.testing.assert_array_equal(client.compute(lazy).result().get(), expected)


@pytest.mark.parametrize("times", range(5))
def test_an_array_that_is_transposed_several_times_is_transposed_once_or_not_at_all(times: int) -> None:
    given = da.from_array(np.arange(24.0).reshape(6, 4), chunks=3)
    for _ in range(times):
        given = given.T
    product = distmm.matmul(given, np.eye(given.shape[1]))
    assert not [name for name in product.dask.layers if name.startswith("transpose")]
    np.testing.assert_array_equal(product.compute(scheduler="threads"), given.compute())

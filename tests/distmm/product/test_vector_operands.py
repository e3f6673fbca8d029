"""Vectors: product tasks read their blocks and make those of C as they are, without tasks that reshape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import distmm

N = 160
A, V = (np.random.default_rng(0).integers(-9, 9, shape).astype("f8") for shape in ((N, N), N))
PRODUCTS: dict[str, tuple[Callable[[da.Array, da.Array], da.Array], np.ndarray]] = {
    "matrix times vector": (lambda X, v: distmm.matmul(X, v), A @ V),
    "vector times matrix": (lambda X, v: distmm.matmul(v, X), V @ A),
    "vector times vector": (lambda X, v: distmm.matmul(v, v), V @ V),
    "transpose times vector": (lambda X, v: distmm.matmul(X.T, v), A.T @ V),
    "a sum": (lambda X, v: distmm.gemm(2, X, v, 3, v), 2 * A @ V + 3 * V),
    "the sum of an array": (lambda X, v: distmm.gemm(2, X, v, 3, V), 2 * A @ V + 3 * V),
}


@pytest.fixture(autouse=True)
def current(client: Client) -> Iterator[None]:
    with client.as_current():
        yield


def names(array: da.Array) -> set[str]:
    """The first words of the names of a graph's tasks that the cluster has not done yet."""
    return {str(key[0]).partition("-")[0] for key in dict(dask.optimize(array)[0].dask)}


@pytest.mark.parametrize("chunk", [8, 40, N])  # blocks of 8 are joined
@pytest.mark.parametrize("name", PRODUCTS)
def test_they_have_no_tasks_but_those_of_the_product(name: str, chunk: int) -> None:
    multiply, expected = PRODUCTS[name]
    X, v = (da.from_array(x, chunk, name=f"persisted-{x.ndim}-{chunk}").persist() for x in (A, V))
    C = multiply(X, v)
    assert names(C) == {"distmm"}
    for made in (C.compute(), C.persist().compute()):
        assert type(made) is type(expected)
        np.testing.assert_array_equal(made, expected)
    np.testing.assert_array_equal(C.sum().compute(), expected.sum())
    if expected.ndim:
        assert names(C[chunk // 4]) <= {"distmm", "getitem"}
        np.testing.assert_array_equal((C[3:-5] + 1).compute(), expected[3:-5] + 1)
        out = np.zeros(N)
        distmm.matmul(X, v, out=out)
        np.testing.assert_array_equal(out, A @ V)


def test_waves_of_a_product_with_a_vector_fill_out() -> None:
    plan = distmm.plan(A, V, plan="g1x1x1 b40x40x1 p1 w4x1 l2")
    assert len(plan.waves) == 4
    out = np.zeros(N)
    distmm.matmul(A, V, out=out, plan=plan)
    np.testing.assert_array_equal(out, A @ V)


def test_blocks_of_another_length_are_refused_by_their_length() -> None:
    wrong = da.from_array(V, 40).map_blocks(lambda block: block[:-1], chunks=(40,), dtype="f8")
    with pytest.raises(distmm.InputError, match=r"a block of B is a ndarray of shape \(39,\), and .* says \(40,\)"):
        distmm.matmul(da.from_array(A, 40), wrong).compute()


def test_a_vector_that_is_changed_later_is_another_one() -> None:
    v = da.from_array(V, 40)
    C = distmm.matmul(da.from_array(A, 40), v)
    v[0] = 100
    np.testing.assert_array_equal(C.compute(), A @ V)

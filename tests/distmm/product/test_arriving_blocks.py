"""Blocks of lazy arrays and of array-likes are what their array says, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse

import distmm
from distmm.errors import InputError
from distmm.worker.tasks.arrivals import arrived

A = np.arange(42.0).reshape(7, 6)
B = np.arange(30.0).reshape(6, 5)


@pytest.fixture(autouse=True)
def in_this_thread() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"):
        yield


def made(change: Callable[[np.ndarray], Any], values: np.ndarray = A) -> da.Array:
    """Return a lazy array that says shape and type of `values`, and whose tasks change the blocks."""
    return da.from_array(values, chunks=(7, 3)).map_blocks(change, dtype=values.dtype, meta=np.empty((0, 0)))


class Variable:
    """An array-like whose blocks are changed when they are read, as those of `netCDF4.Variable` are."""

    def __init__(self, change: Callable[[np.ndarray], Any], dtype: str = "f8") -> None:
        self.change, self.shape, self.ndim, self.dtype = change, A.shape, 2, np.dtype(dtype)

    def __getitem__(self, index: Any) -> Any:
        return self.change(A[index])


CALLS: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda x: distmm.matmul(x, B).compute(),
    "out": lambda x: distmm.matmul(x, B, out=np.zeros((7, 5))),
    "gram": lambda x: distmm.gram(x).compute(),
    "addend": lambda x: distmm.gemm(1, np.ones((7, 2)), np.ones((2, 6)), 1, x).compute(),
    "split k": lambda x: distmm.gemm(
        1, np.ones((7, 4)), np.ones((4, 6)), 1, x, plan="g1x1x2 b7x2x6 p1 w1 l2"
    ).compute(),
    "einsum": lambda x: distmm.einsum("ij,jk->k", x, B).compute(),
    "sum": lambda x: distmm.einsum("ij->i", x).compute(),
    "elements": lambda x: distmm.einsum("ij,j->ij", x, A[0]).compute(),
    "tensordot": lambda x: distmm.tensordot(x, B, 1).compute(),
    "merged dimensions": lambda x: distmm.einsum("ij,ij->", x, x).compute(),
    "cov": lambda x: distmm.cov(x).compute(),
    "corrcoef": lambda x: distmm.corrcoef(x).compute(),
    "topk": lambda x: distmm.topk(x, B, 2)[0].compute(),
    "verify": lambda x: distmm.verify(x, B, A @ B),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("array", [made, Variable])
def test_masked_elements_are_refused(array: Callable[..., Any], call: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match=r"block of .* has \d+ masked elements.*np\.ma\.filled"):
        call(array(lambda x: np.ma.masked_greater(x, 3)))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("array", [made, Variable])
def test_sparse_blocks_of_an_array_that_says_it_is_dense_are_refused_by_name(
    array: Callable[..., Any], call: Callable[[Any], Any]
) -> None:
    with pytest.raises(InputError, match=r"block of .* is a csr_array, and .* dense.*\.toarray\(\).*meta="):
        call(array(scipy.sparse.csr_array))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("array", [made, Variable])
def test_blocks_of_another_shape_are_not_broadcast(array: Callable[..., Any], call: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match=r"of shape \(1, \d\), and its array says \(7, \d\): state the true chunks"):
        call(array(lambda x: x[:1]))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("array", [made, Variable])
def test_blocks_of_another_type_are_not_rounded(array: Callable[..., Any], call: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match="of complex128 elements, and its array says float64: state the true dtype"):
        call(array(lambda x: x * 1j))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: np.ma.masked_greater(x, 1e9),  # netCDF4 gives masked arrays without masked elements
        lambda x: x.astype(">f8"),
        lambda x: x.astype("f4"),  # holds these values
        lambda x: x.astype("i2"),
    ],
    ids=["nothing masked", "other byte order", "float32", "int16"],
)
@pytest.mark.parametrize("array", [made, Variable])
def test_blocks_that_hold_the_same_values_are_multiplied(array: Callable[..., Any], change: Any) -> None:
    np.testing.assert_array_equal(distmm.matmul(array(change), B).compute(), A @ B)
    np.testing.assert_array_equal(distmm.gram(array(change)).compute(), A @ A.T)
    np.testing.assert_allclose(distmm.cov(array(change)).compute(), np.cov(A))
    assert distmm.verify(array(change), B, A @ B).outcome == "right"


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">i4", ">c8", ">f8"])
def test_operands_may_have_any_byte_order(dtype: str) -> None:
    a = A.astype(dtype)
    for x in (a, da.from_array(a, chunks=(4, 3))):
        product = distmm.matmul(x, B.astype(dtype)).compute()
        np.testing.assert_allclose(product, (A @ B).astype(dtype))
        assert product.dtype.isnative


def test_a_block_on_the_host_becomes_a_plain_array() -> None:
    assert arrived(A, "it") is A
    assert arrived(ml_dtypes.bfloat16(1) * np.ones((2, 2), ml_dtypes.bfloat16), "it", (2, 2), "f4").dtype == "f4"
    with pytest.raises(InputError, match="it is a dict of shape"):
        arrived({}, "it", (7, 6))


def test_a_wider_type_is_converted_if_no_element_is_rounded() -> None:
    given = da.from_array(A, chunks=(7, 2)).astype("f4").map_blocks(np.ndarray.astype, "f8", dtype="f4")
    np.testing.assert_array_equal(distmm.matmul(given, B).compute(), A @ B)
    with pytest.raises(InputError, match="of float64 elements, and its array says float32"):
        distmm.matmul(given.map_blocks(np.add, 1e-9, dtype="f4"), B).compute()

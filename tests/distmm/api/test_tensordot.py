"""`tensordot`: NumPy's results, by matrix products of views, and without a block that moves."""

from __future__ import annotations

import itertools
import math
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import distmm
from distmm.errors import InputError
from distmm.product.product import Gemm
from tests.exact_sums import whole_numbers
from tests.tables import number_of

pytestmark = pytest.mark.usefixtures("synchronous")


def operands(products: list[Gemm]) -> list[Any]:
    """What products multiply: A and B of each."""
    return [operand.source for product in products for operand in (product.a, product.b)]


@settings(max_examples=number_of(40))
@given(st.data())
def test_it_is_numpys(data: st.DataObject) -> None:
    free_a, free_b, summed = (data.draw(st.lists(st.integers(1, 5), max_size=2)) for _ in range(3))
    order_a = data.draw(st.permutations(range(len(free_a) + len(summed))))
    order_b = data.draw(st.permutations(range(len(free_b) + len(summed))))
    a = whole_numbers((*free_a, *summed), "i8").transpose(order_a)
    b = whole_numbers((*summed, *free_b), "i8", 1).transpose(order_b)
    axes_a = [order_a.index(len(free_a) + i) - data.draw(st.sampled_from([0, a.ndim])) for i in range(len(summed))]
    axes_b = [order_b.index(i) for i in range(len(summed))]
    chunks = data.draw(st.integers(1, 4))
    A, B = (da.from_array(x, chunks=chunks) if data.draw(st.booleans()) else x for x in (a, b))
    C = distmm.tensordot(A, B, (axes_a, axes_b))
    expected = np.tensordot(a, b, (axes_a, axes_b))
    assert (C.shape, C.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(C.compute(), expected)


@pytest.mark.parametrize(
    "axes", [0, 1, 2, np.int64(1), np.array(2), (0, 0), ([0, 1], (0, 1)), (-1, 1), np.array([[1], [0]])]
)
def test_axes_are_a_number_or_a_pair(axes: Any) -> None:
    a = whole_numbers((3, 3, 3), "i4")
    for A in (a, da.from_array(a, chunks=2)):
        np.testing.assert_array_equal(distmm.tensordot(A, A, axes).compute(), np.tensordot(a, a, axes))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (3, r"axes is 3, A has shape \(3, 4\) and B \(4, 3, 2\) .*: give a number of dimensions that both have"),
        (-1, "axes is -1, .*: give a number of dimensions that both have"),
        ((0, 0), r"dimensions \(0,\) of A must be as many, and as long, as dimensions \(0,\) of B"),
        ((2, 0), r"axes of A: axis 2 is out of bounds for array of dimension 2"),
        (([0, 1], [1]), r"dimensions \(0, 1\) of A must be as many"),
        (([1, -1], [0, 1]), "repeated axis in `axes of A`"),
        (10**30, "or a pair of"),
        ((0, 10**30), "or a pair of"),
        ("ij", "or a pair of"),
        (1.5, "or a pair of"),
        (np.array(1.5), "or a pair of"),
        (np.array(-1), "give a number of dimensions that both have"),
        ((1.5, 0), "or a pair of"),
    ],
)
def test_axes_that_do_not_fit_are_refused(axes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        distmm.tensordot(np.ones((3, 4)), np.ones((4, 3, 2)), axes)


def test_arrays_in_memory_are_multiplied_where_they_lie(products: list[Gemm]) -> None:
    a, b = whole_numbers((4, 5, 6, 7), "f8"), whole_numbers((7, 6, 3), "f8", 1)
    # k is one run of A's memory; B has it backwards, and so it is B that is copied.
    C = distmm.tensordot(a, b, ([2, 3], [1, 0]))
    assert [(x.shape, np.shares_memory(x, of)) for x, of in zip(operands(products), (a, b), strict=True)] == [
        ((20, 42), True), ((42, 3), False),
    ]  # fmt: skip
    np.testing.assert_array_equal(C.compute(), np.tensordot(a, b, ([2, 3], [1, 0])))
    products.clear()
    fortran = np.asfortranarray(a)
    C = distmm.tensordot(fortran, a, ([0, 1], [0, 1]))  # both dimensions, from the last: one run in Fortran's order
    assert [np.shares_memory(x, of) for x, of in zip(operands(products), (fortran, a), strict=True)] == [True, False]
    np.testing.assert_array_equal(C.compute(), np.tensordot(a, a, ([0, 1], [0, 1])))


def test_no_block_of_a_dask_array_moves() -> None:
    a, b = whole_numbers((6, 5, 4), "i4"), whole_numbers((4, 5, 7), "i4", 1)
    A, B = da.from_array(a, chunks=(2, 3, 1)), da.from_array(b, chunks=(1, 3, 4))
    C = distmm.tensordot(A, B, ([1, 2], [1, 0]))
    assert not [name for name in C.dask.layers if "rechunk" in name]
    assert C.chunks == (A.chunks[0], B.chunks[2])
    np.testing.assert_array_equal(C.compute(), np.tensordot(a, b, ([1, 2], [1, 0])))
    D = distmm.tensordot(A, B, (2, 0))  # rows and columns are boxes of two dimensions, and are split again
    assert not [name for name in D.dask.layers if "rechunk" in name]
    assert D.chunks == (*A.chunks[:2], *B.chunks[1:])
    np.testing.assert_array_equal(D.compute(), np.tensordot(a, b, (2, 0)))


def test_other_chunks_of_the_smaller_array_follow_the_larger_one() -> None:
    a, b = whole_numbers((9, 5, 4), "i4"), whole_numbers((5, 4, 2), "i4", 1)
    C = distmm.tensordot(da.from_array(a, chunks=(4, 2, 3)), da.from_array(b, chunks=(3, 1, 2)))
    np.testing.assert_array_equal(C.compute(), np.tensordot(a, b))


def test_beside_an_array_in_memory_it_is_the_dask_array_that_is_cut_anew(products: list[Gemm]) -> None:
    a, b = whole_numbers((9, 6, 4), "i8"), whole_numbers((6, 4, 2), "i8", 1)
    for chunks, cut in (((3, 2, 2), ((1,) * 6, (4,), (2,))), ((3, 4, 2), ((3, 3), (4,), (2,)))):
        C = distmm.tensordot(a, da.from_array(b, chunks=chunks))
        lent, cut_anew = operands(products)
        assert np.shares_memory(lent, a)  # as it is, whatever its size
        assert cut_anew.chunks[0] == tuple(math.prod(box) for box in itertools.product(*cut[:2]))
        np.testing.assert_array_equal(C.compute(), np.tensordot(a, b))
        products.clear()


def test_out_is_filled(tmp_path: Any) -> None:
    a, b = whole_numbers((3, 4, 5), "f8"), whole_numbers((5, 2, 6), "f8", 1)
    expected = np.tensordot(a, b, 1)
    shape = expected.shape
    whole, turned = np.zeros(shape), np.zeros(shape[::-1]).T
    file = zarr.create_array(tmp_path / "c.zarr", shape=shape, chunks=(2, 2, 2, 3), dtype="f8")
    lazy = da.zeros(shape, chunks=2)
    for out in (whole, turned, file, lazy):
        for A, B in ((a, b), (da.from_array(a, chunks=2), da.from_array(b, chunks=(2, 1, 4)))):
            assert distmm.tensordot(A, B, 1, out=out) is out
            np.testing.assert_array_equal(out[:], expected)
            if out is not lazy:
                out[:] = 0


def test_out_that_overlaps_an_operand_is_refused() -> None:
    a = np.zeros((4, 4, 4))
    with pytest.raises(InputError, match="out shares memory with B"):
        distmm.tensordot(np.ones((4, 4)), a, 1, out=a)
    with pytest.raises(InputError, match=r"out is \(4, 4\) float64, the product \(4, 4, 4\) float64"):
        distmm.tensordot(np.ones((4, 4)), a, 1, out=np.zeros((4, 4)))


def test_a_cluster_writes_the_matrix_that_out_is(client: Client, products: list[Gemm]) -> None:
    a, b = whole_numbers((20, 100, 256), "f4"), whole_numbers((256, 50, 40), "f4", 1)
    expected, out = np.tensordot(a, b, 1), np.zeros((20, 100, 50, 40), "f4")
    assert distmm.tensordot(a, b, 1, out=out, client=client) is out
    np.testing.assert_array_equal(out, expected)
    assert [np.shares_memory(x, of) for x, of in zip(operands(products), (a, b), strict=True)] == [True, True]
    C = distmm.tensordot(a, b, 1, client=client)
    assert C.chunks == ((10, 10), (100,), (25, 25), (40,))  # boxes within the blocks of 1024 that the planner chooses
    assert not [name for name in C.dask.layers if "rechunk" in name]
    np.testing.assert_array_equal(client.compute(C, sync=True), expected)

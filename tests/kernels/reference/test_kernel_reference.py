from __future__ import annotations

import numpy as np
import pytest

from distmm.bench.ladder import triple_loop
from tests.kernels.reference import products as reference
from tests.kernels.reference.matrices import STRIDES, error_bound, matrix, strided
from tests.kernels.reference.products import first_difference


def test_float_reference_is_computed_in_twice_the_precision():
    a, b = (matrix((7, 7), "float32", seed) for seed in (0, 1))
    product = reference.multiply(a, b)
    assert product.dtype == np.float64
    np.testing.assert_array_equal(product, a.astype(np.float64) @ b.astype(np.float64))
    assert reference.multiply(a.astype("complex64"), b).dtype == np.complex128


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64"])
def test_integer_reference_wraps_around_as_numpy_does(dtype):
    a, b = (matrix((6, 40), dtype, 0), matrix((40, 5), dtype, 1))
    product = reference.multiply(a, b)
    assert product.dtype == dtype
    np.testing.assert_array_equal(product, a @ b)


def test_bool_reference_is_a_disjunction():
    a, b = (np.random.default_rng(seed).random((9, 9)) < 0.2 for seed in (0, 1))
    np.testing.assert_array_equal(reference.multiply(a, b), a @ b)


def test_triple_loop_is_the_product():
    a, b = matrix((4, 6), "int64", 0, "integers"), matrix((6, 3), "int64", 1, "integers")
    assert triple_loop(a.tolist(), b.tolist()) == (a @ b).tolist()
    assert triple_loop([[], []], []) == [[], []]


def test_first_difference_is_the_first_in_row_major_order():
    expected = np.arange(12.0).reshape(3, 4)
    c = expected.copy()
    c[2, 0], c[1, 3] = -1, 7.5
    found = first_difference(c, expected)
    assert (found.index, found.value, found.expected) == ((1, 3), 7.5, 7.0)
    assert str(found) == "C[1, 3] is 7.5, expected 7.0 (off by 0.5)"


def test_first_difference_looks_at_the_tolerance():
    expected = np.array([[100.0, 1.0]])
    c = expected + 0.5
    assert first_difference(c, expected, atol=0.5) is None
    assert first_difference(c, expected, rtol=0.01).index == (0, 1)
    assert first_difference(c, expected, atol=np.array([[0.1, 0.6]])).index == (0, 0)


def test_first_difference_never_lets_nan_or_the_wrong_infinity_pass():
    expected = np.array([1.0, np.nan, np.inf, -np.inf])
    assert first_difference(expected.copy(), expected) is None
    for index, wrong in ((0, np.nan), (0, np.inf), (1, 0.0), (2, -np.inf), (2, 1e308), (3, np.nan)):
        c = expected.copy()
        c[index] = wrong
        assert first_difference(c, expected, rtol=0.1, atol=10.0).index == (index,)


def test_first_difference_of_integers_is_exact():
    c = np.array([[2**62 + 1]])
    assert first_difference(c, c - 1).expected == 2**62


def test_first_difference_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 2\)"):
        first_difference(np.zeros((2, 3)), np.zeros((3, 2)))


@pytest.mark.parametrize("order", STRIDES)
def test_each_memory_order_holds_the_same_values(order):
    values = matrix((5, 7), "float32", 3)
    laid = matrix((5, 7), "float32", 3, order=order)
    expected = np.broadcast_to(values[:1], values.shape) if order == "broadcast" else values
    np.testing.assert_array_equal(laid, expected)
    assert (laid.strides == values.strides) == (order == "C")


@pytest.mark.parametrize("order", STRIDES)
def test_how_a_matrix_lies_does_not_depend_on_how_it_lay(order):
    values = matrix((5, 7), "float32", 3)
    for before in STRIDES:
        assert strided(strided(values, before), order).strides == strided(values, order).strides


def test_the_error_bound_holds_for_a_plain_chain_and_not_for_a_halved_precision():
    a, b = (matrix((8, 300), "float32", 0, "uniform"), matrix((300, 8), "float32", 1, "uniform"))
    chain = np.zeros((8, 8), np.float32)
    for k in range(300):
        chain += np.outer(a[:, k], b[k])
    bound = error_bound(a, b, "float32")
    assert first_difference(chain, reference.multiply(a, b), atol=bound) is None
    rounded = a.astype(np.float16).astype(np.float32) @ b
    assert first_difference(rounded, reference.multiply(a, b), atol=bound) is not None

"""Grades tell arithmetics apart, and say which bounds the twins of the tensor-core kernels keep."""

from __future__ import annotations

import numpy as np
import pytest

from distmm_kernels.emulation.formats import Guard
from distmm_kernels.emulation.sparsity import holds
from distmm_kernels.layout.real_view import as_real
from tests.kernels.reference import complex_twin, grades, residue_twin, twins
from tests.tables import later

SIZES = {"m": 8, "k": 1024, "n": 8}


def guards(split, a, b):
    return split(a)[-1] | split(np.ascontiguousarray(b.T))[-1]


def fast(raised, count, a, b):
    """Whether the guards of one granule let it go the fast way."""
    return not raised or (raised == Guard.SPARSE and holds(count(a), count(np.ascontiguousarray(b.T))))


def fp16x3(a, b):
    """Multiply one granule as the kernel does, by the way that its guards choose."""
    return twins.fp16x3(a, b) if fast(guards(twins.split_fp16, a, b), twins.fp16_counts, a, b) else tf32x3(a, b)


def tf32x3(a, b):
    return twins.fma_chain(a, b) if guards(twins.split_tf32, a, b) else twins.tf32x3(a, b)


def residues(a, b):
    product, raised = residue_twin.product(a, b)
    return product if fast(raised, residue_twin.row_counts, a, b) else residue_twin.fma_chain(a, b)


def complex_residues(a, b):
    product, raised = complex_twin.product(a, b)
    return product if fast(raised, lambda x: residue_twin.row_counts(as_real(x)), a, b) else a @ b


def scaled_by_rows_and_columns(a, b):
    """Multiply integers of 50 bits for the largest number of each row and column."""
    rows, columns = (np.frexp(np.abs(x).max(axis=axis, keepdims=True))[1] for x, axis in ((a, 1), (b, 0)))
    left, right = (np.rint(np.ldexp(x, 50 - e)) for x, e in ((a, rows), (b, columns)))
    return np.ldexp(left @ right, rows + columns - 100)


def strassen(a, b):
    (a11, a12), (a21, a22) = (np.split(half, 2, axis=1) for half in np.split(a, 2))
    (b11, b12), (b21, b22) = (np.split(half, 2, axis=1) for half in np.split(b, 2))
    m1, m2, m3 = (a11 + a22) @ (b11 + b22), (a21 + a22) @ b11, a11 @ (b12 - b22)
    m4, m5 = a22 @ (b21 - b11), (a11 + a12) @ b22
    m6, m7 = (a21 - a11) @ (b11 + b12), (a12 - a22) @ (b21 + b22)
    return np.block([[m1 + m4 - m5 + m7, m3 + m5], [m2 + m4, m1 - m2 + m3 + m6]])


@pytest.mark.parametrize(
    ("multiply", "dtype"),
    later([(twins.fma_chain, "float32"), (residue_twin.fma_chain, "float64"), (np.matmul, "complex64")]),
)
def test_chains_of_multiply_adds_keep_the_bound_of_each_element(multiply, dtype):
    assert grades.grade(multiply, dtype, **SIZES).letter == "A"


def test_numbers_with_fixed_digits_in_their_rows_and_columns_keep_the_bound_of_rows_and_columns():
    found = grades.grade(scaled_by_rows_and_columns, "float64", **SIZES)
    assert found.letter == "B"
    assert found.worst[0] > 1 > found.worst[1]


@pytest.mark.minutes
def test_strassens_algorithm_keeps_the_bound_of_norms():
    found = grades.grade(strassen, "float64", **SIZES)
    assert found.letter == "C"
    assert set(found.lost) == {"A", "B"}


def test_operands_rounded_to_ten_bits_keep_no_bound_of_float64():
    def rounded(a, b):
        digits, exponents = np.frexp(a)
        return np.ldexp(np.rint(np.ldexp(digits, 10)), exponents - 10) @ b

    assert grades.grade(rounded, "float64", **SIZES).letter == "F"


def test_infinity_where_there_is_none_keeps_no_bound():
    assert grades.grade(lambda a, b: np.where(np.eye(8) > 0, np.inf, a @ b), "float64", **SIZES).letter == "F"


@pytest.mark.parametrize(
    ("multiply", "dtype"),
    later([(tf32x3, "float32"), (fp16x3, "float32"), (residues, "float64"), (complex_residues, "complex128")]),
)
def test_emulated_products_keep_the_bound_of_each_element(multiply, dtype):
    assert grades.grade(multiply, dtype, **SIZES).letter == "A"


@pytest.mark.parametrize(
    ("multiply", "dtype", "span"),
    [
        (twins.fp16x3, "float32", 32),
        (lambda a, b: residue_twin.product(a, b)[0], "float64", 8),
        (lambda a, b: complex_twin.product(a, b)[0], "complex128", 16),
    ],
)
def test_a_fixed_number_of_digits_loses_small_columns_that_the_other_operand_selects(multiply, dtype, span):
    for smaller in grades.SPANS[np.finfo(dtype).dtype.name]:
        a, b = grades.pair("small columns selected", dtype, 8, 1024, 8, smaller)
        assert (grades._over_bounds(multiply(a, b), a, b)["A"] > 1) == (smaller >= span)

"""Copies of operands to vectors, on the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distmm_kernels.config import Problem
from distmm_kernels.gemm.tiled import TiledKernel
from distmm_kernels.layout import real_view, vectors
from distmm_kernels.symmetric import mirror
from tests.kernels.device_code.simulator.simulated_gpu import GPU, RealigningKernel
from tests.kernels.reference.exact import doubled_twin
from tests.kernels.reference.matrices import matrix


# rows shorter than a word, of 1, 2 and more than 4 chunks of 128 words; from any byte of a word on, to any; in reverse
@settings(max_examples=20)
@given(
    dtype=st.sampled_from(["int8", "float16", "complex128"]),
    row=st.sampled_from([1, 2, 3, 4, 7, 511, 512, 513, 1030, 2051]),
    batch=st.sampled_from([(), (1,), (2,)]),
    others=st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 3)),
    reverse=st.tuples(st.booleans(), st.booleans()),
)
def test_rows_that_begin_anywhere_are_copied_to_vectors_and_no_byte_beside_them_is_used(
    dtype, row, batch, others, reverse
):
    dtype, (count, before, gap) = np.dtype(dtype), others
    columns, before = -(-row // dtype.itemsize), before * dtype.itemsize
    shape = *batch, count, columns + gap
    memory = np.full(before + math.prod(shape) * dtype.itemsize, 0xA5, np.uint8)
    rows = np.ndarray(shape, dtype, memory, before)[..., :columns]
    rows[...] = matrix(rows.shape, "int32", 0, "integers")
    rows = rows[..., :: -1 if reverse[0] else 1, :]
    rows = rows[::-1] if batch and reverse[1] else rows
    copied = vectors.in_vectors(rows, GPU)
    assert vectors.has_vectors(copied, -1)
    np.testing.assert_array_equal(copied, rows)
    vector = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    filled = np.lib.stride_tricks.as_strided(copied, (*rows.shape[:-1], vector))
    assert not filled[..., columns:].any()
    first, end = np.lib.array_utils.byte_bounds(rows)
    assert RealigningKernel.read
    assert all(first <= low and high <= end for low, high in RealigningKernel.read)


# by words where columns are whole ones from the first byte on; else, and larger elements, one by one
@settings(max_examples=6)
@example("int8", 132, 129, (2,), (0, 4), False)
@example("float16", 66, 65, (), (4, 0), True)
@given(
    dtype=st.sampled_from(["int8", "float16", "float32"]),
    m=st.sampled_from([2, 3, 4, 64, 132]),
    n=st.sampled_from([1, 5, 129]),
    batch=st.sampled_from([(), (2,)]),
    others=st.tuples(st.sampled_from([0, 4, 5]), st.sampled_from([0, 0, 4, 5])),
    reverse=st.booleans(),
)
def test_matrices_in_fortran_order_are_copied_to_vectors(dtype, m, n, batch, others, reverse):
    dtype, (before, gap) = np.dtype(dtype), others
    shape = *batch, n, m + gap
    memory = np.full(before * dtype.itemsize + math.prod(shape) * dtype.itemsize, 0xA5, np.uint8)
    columns = np.ndarray(shape, dtype, memory, before * dtype.itemsize)[..., :m]
    columns[...] = matrix(columns.shape, "int32", 0, "integers")
    columns = columns[..., :: -1 if reverse else 1, :]
    copied = vectors.in_vectors(columns.swapaxes(-1, -2), GPU)
    assert vectors.has_vectors(copied, -1)
    np.testing.assert_array_equal(copied, columns.swapaxes(-1, -2))
    vector = -(-n * dtype.itemsize // 16) * 16 // dtype.itemsize
    filled = np.lib.stride_tricks.as_strided(copied, (*copied.shape[:-1], vector))
    assert not filled[..., n:].any()


@settings(max_examples=6)
@example("complex64", 5, 3, (), "F")
@example("complex128", 9, 130, (2,), "C")
@given(
    dtype=st.sampled_from(["complex64", "complex128"]),
    k=st.sampled_from([1, 3, 4, 5, 9]),
    n=st.sampled_from([1, 2, 127, 129]),
    batch=st.sampled_from([(), (2,)]),
    order=st.sampled_from(["C", "F", "offset", "reversed", "broadcast"]),
)
def test_complex_matrices_become_real_ones(dtype, k, n, batch, order):
    b = matrix((*batch, k, n), dtype, 0, "normal", "C" if order == "reversed" else order)
    b = b[..., ::-1, :] if order == "reversed" else b
    made = real_view.doubled(b, GPU)
    np.testing.assert_array_equal(made, doubled_twin(b))
    lines = made if made.strides[-1] == made.itemsize else made.swapaxes(-1, -2)
    assert vectors.has_vectors(lines, -1) or lines.shape[-1] * lines.itemsize < 16
    vector = -(-lines.shape[-1] * lines.itemsize // 16) * 16 // lines.itemsize
    filled = np.lib.stride_tricks.as_strided(lines, (*lines.shape[:-1], vector))
    assert not filled[..., lines.shape[-1] :].any()


@pytest.mark.parametrize("n", [1, 31, 32, 65, 97])
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
@pytest.mark.parametrize(("batch", "symmetry"), [((), "hermitian"), ((2, 1), "symmetric")])
def test_matrices_are_mirrored_as_numpys_are(n, dtype, batch, symmetry):
    whole = matrix((*batch, n, n + 3), dtype, 0, "normal")
    d, expected = whole[..., :n], whole[..., :n].copy()
    beside = whole[..., n:].copy()
    TiledKernel(Problem(1, 1, 1, d.dtype), GPU)._mirror(d, symmetry)
    mirror(expected, symmetry)
    np.testing.assert_array_equal(d, expected)
    np.testing.assert_array_equal(whole[..., n:], beside)

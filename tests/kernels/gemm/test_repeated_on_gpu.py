"""Batches in which a broadcast repeats matrices: each kernel gives the right product, and prepares a matrix once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distmm_kernels.candidates import CANDIDATES
from distmm_kernels.config import NARROW, SUPPORTED, Problem
from distmm_kernels.select import select, why_not
from tests.kernels.reference.matrices import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

CASES = [
    (candidate.name, dtype)
    for candidate, dtype in itertools.product(CANDIDATES, SUPPORTED + NARROW)
    if candidate.device_kind == "cuda" and dtype.name in candidate.dtypes
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("order", ["C", "F", "offset"])
@pytest.mark.parametrize("k", [70, 1100])
def test_products_of_repeated_matrices_are_right(gpu, name, dtype, order, k):
    import cupy

    candidate = next(each for each in CANDIDATES if each.name == name)
    if reason := why_not(candidate, Problem(1, 1, 1, dtype), gpu):
        pytest.skip(reason)
    rng = np.random.default_rng(0)
    one = rng.integers(-9, 10, (67, k)).astype(dtype)
    several = rng.integers(-9, 10, (3, 2, k, 41)).astype(dtype)
    a = cupy.broadcast_to(on_gpu(one, order), (3, 2, 67, k))
    b = cupy.broadcast_to(on_gpu(several[:, :1]), several.shape)
    kernel = select(Problem(1, 1, 1, dtype), gpu, name=name)
    expected = one.astype("c16").real @ several[:, :1].astype("c16").real
    left, right = kernel.prepare_a(a), kernel.prepare_b(b)
    assert (left.shape, right.shape) == (a.shape, b.shape)
    for c in (None, cupy.ones((3, 2, 67, 41), kernel.accumulator)):
        d = kernel.multiply(left, right, c).get()
        np.testing.assert_array_equal(d, np.broadcast_to(expected, d.shape) + (c is not None))


@pytest.mark.parametrize(
    "name", ["fp16x3", "tf32x3", "mma_sync_fp16x3", "mma_sync_tf32", "hopper_tf32", "residues", "integer_residues"]
)
def test_a_repeated_matrix_takes_the_memory_of_one(gpu, live_memory, name):
    import cupy

    dtype = np.dtype({"residues": "float64", "integer_residues": "int64"}.get(name, "float32"))
    candidate = next(each for each in CANDIDATES if each.name == name)
    if reason := why_not(candidate, Problem(1, 1, 1, dtype), gpu):
        pytest.skip(reason)
    kernel = select(Problem(1, 1, 1, dtype), gpu, name=name)
    one = on_gpu(np.ones((256, 1024), dtype), "offset")
    many = cupy.broadcast_to(one, (500, *one.shape))
    kernel.prepare_a(many)  # loads the kernels
    with live_memory() as live:
        prepared = kernel.prepare_a(many)
    assert prepared.shape == many.shape
    assert live.peak < 5 * one.nbytes

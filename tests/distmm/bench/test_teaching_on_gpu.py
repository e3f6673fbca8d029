"""The teaching kernels of the ladder on a GPU: right for every shape and stride, with the bits of a chain."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distmm.bench.teaching_kernels import TEACHING
from distmm_kernels import device
from distmm_kernels.config import Problem
from distmm_kernels.gemm.tiled import TiledKernel
from tests.kernels.reference.matrices import RAGGED_SHAPES, STRIDES, matrix, on_gpu

pytestmark = pytest.mark.gpu

each = pytest.mark.parametrize("candidate", TEACHING, ids=lambda candidate: candidate.name)


def check(candidate, gpu, dtype, a, b, c=None):
    """Operands are integers, whose products are exact in every type; freed memory holds another number."""
    import cupy

    kernel = candidate.kernel(Problem(1, 1, 1, np.dtype(dtype)), gpu)
    expected = a @ b if c is None else a @ b + c
    poison = cupy.full(max(1, expected.size), -77, dtype)
    del poison
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None if c is None else cupy.asarray(c))
    np.testing.assert_array_equal(d.get(), expected)
    return d


@each
@pytest.mark.parametrize(("dtype", "shape"), [*itertools.product(("float32", "int64", "complex128"), RAGGED_SHAPES)])
def test_every_ragged_shape_is_right(gpu, candidate, dtype, shape):
    m, k, n = shape
    a, b, c = (matrix(s, dtype, seed, "integers") for seed, s in enumerate(((m, k), (k, n), (m, n))))
    check(candidate, gpu, dtype, a, b)
    check(candidate, gpu, dtype, a, b, c)


@each
@pytest.mark.parametrize("order", STRIDES)
def test_every_stride_is_right_in_place(gpu, candidate, order):
    a, b = (matrix(s, "float32", seed, "normal", order) for seed, s in enumerate(((33, 70), (70, 45))))
    left, right = on_gpu(a, order), on_gpu(b, order)
    kernel, tiled = (made(Problem(1, 1, 1, np.dtype("float32")), gpu) for made in (candidate.kernel, TiledKernel))
    assert kernel.prepare_a(left) is left
    bits = tiled.multiply(left, right, None).get()
    np.testing.assert_array_equal(kernel.multiply(left, right, None).get(), bits)


@each
@pytest.mark.parametrize(("left", "right"), [((3,), (3,)), ((2, 1), (3,)), ((), (4,)), ((0,), ())])
def test_batches_broadcast(gpu, candidate, left, right):
    a, b = matrix((*left, 5, 40), "int32", 0, "integers"), matrix((*right, 40, 7), "int32", 1, "integers")
    check(candidate, gpu, "int32", a, b)


@pytest.mark.multigpu
@each
def test_the_second_gpu_of_a_process_serves_as_well_as_the_first(candidate):
    a, b = (matrix(s, "float32", seed, "integers") for seed, s in enumerate(((70, 90), (90, 50))))
    d = check(candidate, device.gpus()[1], "float32", a, b)
    assert d.device.id == 1

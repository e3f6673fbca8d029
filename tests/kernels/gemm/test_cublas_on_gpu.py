"""cuBLAS by its own path for each type: the values, the types of results, and how operands may lie."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.select import CANDIDATES, select, why_not
from tests.kernels.reference.matrices import STRIDES, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TYPES = ("float32", "float64", "complex64", "complex128", "float16", BFLOAT16)
PATHS = [
    *(("cublas", np.dtype(dtype)) for dtype in TYPES),
    ("cublas_tf32", np.dtype("f4")),
    ("cublas_int8", np.dtype("i1")),
]
paths = pytest.mark.parametrize(("name", "dtype"), PATHS)


@pytest.fixture
def kernel_for(gpu):
    def make(name, dtype):
        candidate = next(each for each in CANDIDATES if each.name == name)
        if reason := why_not(candidate, Problem(1, 1, 1, dtype), gpu):
            pytest.skip(reason)
        return select(Problem(1, 1, 1, dtype), gpu, name=name)

    return make


def integers(shape, dtype, seed):
    """Numbers whose products and sums are exact in every type."""
    rng = np.random.default_rng(seed)
    return rng.integers(-9, 10, shape).astype(dtype)


def exact(a, b):
    wide = "c16" if a.dtype.kind == "c" else "f8"
    return a.astype(wide) @ b.astype(wide)


@paths
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 1, 1), (1, 33, 5), (7, 1, 130), (65, 129, 97), (128, 256, 192), (3, 1003, 2), (200, 70, 1)),
        *((33, 64, 64), (100, 100, 128), (257, 16, 64)),
    ],
)
def test_products_of_integers_are_exact_however_operands_lie(kernel_for, name, dtype, shape):
    import cupy

    m, k, n = shape
    kernel = kernel_for(name, dtype)
    a, b = integers((m, k), dtype, 1), integers((k, n), dtype, 2)
    c = cupy.asarray(integers((m, n), kernel.accumulator, 3))
    for of_a, of_b in itertools.product(STRIDES[:5], STRIDES[:5]):
        left, right = kernel.prepare_a(on_gpu(a, of_a)), kernel.prepare_b(on_gpu(b, of_b))
        np.testing.assert_array_equal(kernel.multiply(left, right, None).get(), exact(a, b))
        np.testing.assert_array_equal(kernel.multiply(left, right, c).get(), exact(a, b) + c.get())


@paths
def test_c_is_left_as_it_was(kernel_for, name, dtype):
    import cupy

    kernel = kernel_for(name, dtype)
    a, b = (kernel.prepare_a(cupy.ones((40, 40), dtype)) for _ in range(2))
    c = cupy.full((40, 40), 3, kernel.accumulator)
    d = kernel.multiply(a, b, c)
    assert (d.get() == 43).all()
    assert (c.get() == 3).all()


@pytest.mark.parametrize("dtype", [np.dtype("f2"), BFLOAT16])
@pytest.mark.parametrize("added", [False, True])
def test_results_of_16_bits_are_rounded_once(kernel_for, dtype, added):
    import cupy

    kernel = kernel_for("cublas", dtype)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype("f4").astype(dtype) for shape in ((300, 5000), (5000, 200)))
    c = rng.standard_normal((300, 200)).astype("f4") if added else None
    left, right = kernel.prepare_a(cupy.asarray(a)), kernel.prepare_b(cupy.asarray(b))
    added_to = None if c is None else cupy.asarray(c)
    narrow = kernel.multiply(left, right, added_to, dtype=dtype)
    assert narrow.dtype == dtype
    expected = exact(a, b) + (0 if c is None else c)
    size = abs(a.astype("f8")) @ abs(b.astype("f8"))
    unit = 2.0**-11 if dtype == np.float16 else 2.0**-8
    error = abs(narrow.get().astype("f8") - expected)
    assert (error <= 1.01 * unit * abs(expected) + 2.0**-20 * size).all()  # 5000 roundings to 16 bits would be 40 units


@pytest.mark.parametrize(("name", "kept"), [("cublas", True), ("cublas_tf32", False)])
def test_only_the_path_for_it_rounds_float32_to_tf32(kernel_for, monkeypatch, name, kept):
    import cupy

    monkeypatch.setenv("CUPY_TF32", "1")  # is for CuPy's own products
    dtype = np.dtype("f4")
    kernel = kernel_for(name, dtype)
    a = cupy.full((256, 256), 1 + 2**-20, dtype)
    one = cupy.eye(256, dtype=dtype)
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(one), None)
    assert (d == a).all() == kept
    assert abs(d - a).max() <= 2**-10


@paths
def test_batches_broadcast(kernel_for, name, dtype):
    kernel = kernel_for(name, dtype)
    a, b = integers((2, 1, 33, 50), dtype, 1), integers((3, 50, 20), dtype, 2)
    c = integers((2, 3, 33, 20), kernel.accumulator, 3)
    left, right = kernel.prepare_a(on_gpu(a, "C")), kernel.prepare_b(on_gpu(b, "C"))
    np.testing.assert_array_equal(kernel.multiply(left, right, None).get(), exact(a, b))
    np.testing.assert_array_equal(kernel.multiply(left, right, on_gpu(c, "C")).get(), exact(a, b) + c)


def test_the_modes_that_cupy_works_in_are_as_they_were(kernel_for):
    import cupy
    from cupy.cuda import cublas, get_cublas_handle

    handle = get_cublas_handle()
    before = cublas.getMathMode(handle), cublas.getPointerMode(handle)
    kernel = kernel_for("cublas", np.dtype("f2"))
    one = kernel.prepare_a(cupy.ones((64, 64), "f2"))
    kernel.multiply(one, one, None)
    assert (cublas.getMathMode(handle), cublas.getPointerMode(handle)) == before

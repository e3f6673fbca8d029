"""Products of 8-bit floats with scales, on the CPU; `gemm/test_float8_on_gpu.py` has the same on GPUs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import distmm_kernels
from distmm_kernels import device, select
from distmm_kernels.config import FLOAT8, Problem
from distmm_kernels.layout.float8 import carrier, native, widened
from distmm_kernels.scaled import scaled_product

M, K, N = 30, 300, 260


def operand(shape, seed, dtype):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def expanded(scale, shape):
    """The factor of each element."""
    factors = np.asarray(scale)
    for axis, size in enumerate(shape):
        if factors.ndim and factors.shape[axis] not in (1, size):
            factors = factors.repeat(128, axis).take(range(size), axis)
    return np.broadcast_to(factors, shape)


@pytest.mark.parametrize(("of_a", "of_b"), list(itertools.product(FLOAT8, FLOAT8)))
@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [((), ()), ((M, 1), (1, N)), ((M, 3), (3, N)), ((1, 3), (3, 3)), ((), (3, N)), ((M, 1), ())],
)
def test_scales_multiply_what_they_stand_for(of_a, of_b, shape_a, shape_b):
    a, b, rng = operand((M, K), 1, of_a), operand((K, N), 2, of_b), np.random.default_rng(3)
    scale_a, scale_b = (rng.uniform(0.1, 10, shape).astype("f4") for shape in (shape_a, shape_b))
    left, right = (x.astype("f8") * expanded(s, x.shape) for x, s in ((a, scale_a), (b, scale_b)))
    d = scaled_product(a, b, scale_a, scale_b, device=device.cpu())
    assert d.dtype == np.float32
    assert (np.abs(d - left @ right) <= 1e-5 * (np.abs(left) @ np.abs(right))).all()


@pytest.mark.parametrize(
    ("scale_a", "scale_b", "message"),
    [
        (np.ones((M, 2)), 1.0, r"scale_a has shape \(30, 2\)"),
        (1.0, np.ones((N, 3)), r"scale_b has shape \(3, 260\)"),
        (np.ones(M), 1.0, r"scale_a has shape \(30,\)"),
    ],
)
def test_scales_of_other_shapes_are_refused(scale_a, scale_b, message):
    a, b = operand((M, K), 1, FLOAT8[0]), operand((K, N), 2, FLOAT8[0])
    with pytest.raises(ValueError, match=message):
        scaled_product(a, b, scale_a, scale_b, device=device.cpu())


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"a is float32.*float8_e4m3fn or float8_e5m2"):
        scaled_product(np.ones((2, 2), "f4"), np.ones((2, 2), FLOAT8[0]), device=device.cpu())
    kernel = select.select(Problem(2, 2, 2, FLOAT8[0]), device.cpu())
    with pytest.raises(TypeError, match="a result cannot be float8_e4m3fn"):
        kernel.finish(np.ones((2, 2), "f4"), 1, 0, None, FLOAT8[0])
    integers = select.select(Problem(2, 2, 2, np.dtype("int32")), device.cpu())
    with pytest.raises(TypeError, match="float8_e5m2"):
        integers.prepare_a(np.ones((2, 2), FLOAT8[1]))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_8_bit_float_widens_to_itself(dtype):
    every = np.arange(256, dtype="u1").view(dtype)
    assert native(every.view(carrier(dtype)).dtype) == dtype
    for x in (every, every.view(carrier(dtype))):
        np.testing.assert_array_equal(widened(x), every.astype("f4"))


@pytest.mark.parametrize(("of_a", "of_b"), list(itertools.product(FLOAT8, FLOAT8)))
def test_matmul_of_arrays_returns_float32(of_a, of_b):
    a, b = operand((M, K), 1, of_a), operand((K, N), 2, of_b)
    d = distmm_kernels.matmul(a, b)
    assert d.dtype == np.float32
    np.testing.assert_allclose(d, a.astype("f8") @ b.astype("f8"), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("precision", "capability", "name"),
    [("high", (9, 0), "hopper_float8"), ("highest", (9, 0), "hopper"), ("ieee", (9, 0), "register_tiled")],
)
def test_float8_tensor_cores_are_of_precision_high(precision, capability, name):
    hopper = device.Device("cuda", "NVIDIA H200", 0, 0, capability, 132)
    assert select.choose(Problem(8192, 8192, 8192, FLOAT8[0]), hopper, precision, reproducible=True).name == name


def test_a_product_without_steps_of_k_is_zero_whatever_its_scales():
    a, b = operand((M, 0), 1, FLOAT8[0]), operand((0, N), 2, FLOAT8[0])
    for blocks in (0, 1):
        scales = np.ones((M, blocks), "f4"), np.ones((blocks, N), "f4")
        made = scaled_product(a, b, *scales, dtype=np.float16, device=device.cpu())
        assert (made.shape, made.dtype, made.any()) == ((M, N), np.float16, False)

"""8-bit floats on Hopper's tensor cores: both types in any order, scales, and the bits of the twin."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels.config import FLOAT8, Problem
from distmm_kernels.layout.float8 import carrier, native, widened
from distmm_kernels.scaled import scaled_product
from tests.kernels.reference import twins

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

PAIRS = pytest.mark.parametrize(("of_a", "of_b"), list(itertools.product(FLOAT8, FLOAT8)))


@pytest.fixture
def kernel(hopper):
    from distmm_kernels.gemm.hopper_float8 import HopperFloat8Kernel

    return HopperFloat8Kernel(Problem(1, 1, 1, FLOAT8[0]), hopper)


def integers(shape, seed, dtype):
    """Exact in either type, and small enough that 13 bits hold each sum of 128 products."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


def normal(shape, seed, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def exact(a, b):
    return a.astype("f8") @ b.astype("f8")


@PAIRS
def test_integers_are_exact_for_every_shape_and_c(kernel, of_a, of_b):
    for m, k, n in [(1, 1, 1), (127, 63, 255), (129, 129, 257), (3, 500, 2), (300, 1000, 520), (513, 4099, 77)]:
        a, b = integers((m, k), 1, of_a), integers((k, n), 2, of_b)
        c = normal((m, n), 3).round()
        a_, b_ = kernel.prepare_a(a), kernel.prepare_b(b)
        np.testing.assert_array_equal(kernel.multiply(a_, b_, None).get(), exact(a, b))
        np.testing.assert_array_equal(kernel.multiply(a_, b_, kernel._module.asarray(c)).get(), exact(a, b) + c)


@PAIRS
def test_bits_are_those_of_the_twin(kernel, of_a, of_b):
    a, b, c = normal((17, 700), 1, of_a), normal((700, 24), 2, of_b), normal((17, 24), 3)
    a_, b_ = kernel.prepare_a(a), kernel.prepare_b(b)
    np.testing.assert_array_equal(kernel.multiply(a_, b_, None).get(), twins.float8(a, b))
    np.testing.assert_array_equal(kernel.multiply(a_, b_, kernel._module.asarray(c)).get(), twins.float8(a, b, c))


def test_bits_do_not_depend_on_how_k_is_cut_or_joined(kernel):
    a, b = normal((300, 1100), 1, FLOAT8[0]), normal((1100, 500), 2, FLOAT8[0])
    whole = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)
    for cuts in ([128], [256, 512, 768, 1024], list(range(128, 1100, 128))):
        parts = list(itertools.pairwise((0, *cuts, 1100)))
        pairs = [(kernel.prepare_a(a[:, i:j]), kernel.prepare_b(b[i:j])) for i, j in parts]
        for operands in (pairs, kernel.joined(pairs)):
            d = None
            for left, right in operands:
                d = kernel.multiply(left, right, d)
            assert (d == whole).all()


def test_batches_and_other_layouts(kernel):
    a, b = integers((3, 140, 200), 1, FLOAT8[0]), integers((200, 130), 2, FLOAT8[1])
    np.testing.assert_array_equal(kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None).get(), exact(a, b))
    on_gpu = [kernel._module.asarray(np.asfortranarray(x).view(carrier(x.dtype))) for x in (a[0][::2, ::-1], b)]
    d = kernel.multiply(kernel.prepare_a(on_gpu[0]), kernel.prepare_b(on_gpu[1]), None)
    np.testing.assert_array_equal(d.get(), exact(a[0][::2, ::-1], b))


@PAIRS
@pytest.mark.parametrize("out", ["float32", ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["hopper_float8", "hopper"])
def test_scales_of_tensors_rows_and_blocks(hopper, of_a, of_b, out, name):
    m, k, n = 300, 700, 333
    a, b, rng = normal((m, k), 1, of_a), normal((k, n), 2, of_b), np.random.default_rng(3)
    shapes = [((), ()), ((m, 1), (1, n)), ((m, 6), (6, n)), ((3, 6), (6, 3)), ((), (6, n)), ((m, 1), (6, 3))]
    for shape_a, shape_b in shapes:
        sa, sb = (rng.uniform(0.1, 10, shape).astype("f4") for shape in (shape_a, shape_b))
        rows = np.broadcast_to(sa, (m, 1)) if sa.ndim == 0 or sa.shape[1] == 1 else sa.repeat(128, 1)[:, :k]
        rows = rows.repeat(128, 0)[:m] if len(rows) == 3 else rows
        columns = np.broadcast_to(sb, (1, n)) if sb.ndim == 0 or sb.shape[0] == 1 else sb.repeat(128, 0)[:k]
        columns = columns.repeat(128, 1)[:, :n] if columns.shape[1] == 3 else columns
        left, right = a.astype("f8") * rows, b.astype("f8") * columns
        d = scaled_product(a, b, sa, sb, dtype=out, device=hopper, name=name)
        assert d.dtype == np.dtype(out)
        error = np.abs(d.get().astype("f8") - left @ right)
        assert (error <= (2e-3 if out == "float32" else 6e-3) * (np.abs(left) @ np.abs(right))).all()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_8_bit_float_widens_to_itself_on_the_gpu(kernel, dtype):
    every = np.arange(256, dtype="u1").view(dtype)
    moved = kernel._module.asarray(every.view(carrier(every.dtype)))
    assert native(moved.dtype) == dtype
    np.testing.assert_array_equal(widened(moved).get(), every.astype("f2"))


@pytest.mark.parametrize("name", ["hopper", "cublas", "mma_sync", "register_tiled"])
def test_other_kernels_multiply_8_bit_floats_exactly(hopper, name):
    from distmm_kernels.select import select

    a, b = integers((70, 90), 1, FLOAT8[0]), integers((90, 50), 2, FLOAT8[1])
    other = select(Problem(70, 90, 50, FLOAT8[0]), hopper, name=name)
    d = other.multiply(other.prepare_a(a), other.prepare_b(b), None)
    np.testing.assert_array_equal(d.get(), exact(a, b))

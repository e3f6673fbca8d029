"""alpha, beta and C0 in the last product's launch, on a real GPU: the bits of `multiply` and then `finish`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.select import select
from distmm_kernels.tiles.hopper_tiles import STRETCH
from tests.kernels.reference.matrices import STRIDES, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CASES = [("hopper", "float16"), ("hopper", BFLOAT16), ("hopper_tf32", "float32"), ("fp16x3", "float32")]
# tiles of each width, one element, and k beyond what the tensor cores sum up: few tiles and many
SHAPES = [(1, 1, 1), (129, 257, 129), (1100, 512, 1160), (4200, 100, 1020), (300, 8193, 264), (4200, 8200, 760)]
FACTORS = [(0.3, 0.0), (1.0, -1.7), (-2.5, 1.0), (0.1, 0.7)]


@pytest.fixture
def kernel_for(hopper):
    return lambda name, dtype: select(Problem(1, 1, 1, np.dtype(dtype)), hopper, name=name)


def normal(shape, seed, dtype="f4"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def passes(kernel, monkeypatch):
    """Count products that are finished in passes."""
    seen, in_passes = [], type(kernel)._in_passes

    def counted(self, d, *finish):
        seen.append(finish)
        return in_passes(self, d, *finish)

    monkeypatch.setattr(type(kernel), "_in_passes", counted)
    return seen


def agree(fused, finished):
    assert fused.dtype == finished.dtype
    assert fused.shape == finished.shape
    bits = f"u{fused.itemsize}"
    np.testing.assert_array_equal(fused.get().view(bits), finished.get().view(bits))


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adds", [False, True])
def test_bits_are_those_of_the_product_and_then_passes(kernel_for, name, dtype, shape, adds):
    kernel, (m, k, n) = kernel_for(name, dtype), shape
    a, b = kernel.prepare_a(normal((m, k), 1, dtype)), kernel.prepare_b(normal((k, n), 2, dtype))
    c, c0 = on_gpu(normal((m, n), 3)) if adds else None, on_gpu(normal((m, n), 4))
    d = kernel.multiply(a, b, c)
    before = d.copy()
    for to in {"float32", np.dtype(dtype).name}:
        for alpha, beta in FACTORS:
            added = c0.astype(to) if beta else None
            fused = kernel.multiply(a, b, c, alpha=alpha, beta=beta, c0=added, dtype=to)
            agree(fused, kernel.finish(d, alpha, beta, added, to))
    assert bool((d == before).all())


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_one_launch_does_it_and_leaves_c_and_c0_as_they_were(kernel_for, monkeypatch, name, dtype):
    kernel = kernel_for(name, dtype)
    a, b = kernel.prepare_a(normal((300, 1024), 1, dtype)), kernel.prepare_b(normal((1024, 520), 2, dtype))
    c, c0 = on_gpu(normal((300, 520), 3)), on_gpu(normal((300, 520), 4))
    kept = c.copy(), c0.copy()
    seen = passes(kernel, monkeypatch)
    kernel.multiply(a, b, c, alpha=2, beta=3, c0=c0)
    assert not seen
    assert bool((c == kept[0]).all())
    assert bool((c0 == kept[1]).all())


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("of", ["float32", BFLOAT16, "float64", "int8"])
@pytest.mark.parametrize("how", [*STRIDES, "row", "column", "number"])
def test_c0_may_lie_anyhow_be_of_any_type_and_broadcast(kernel_for, name, dtype, of, how):
    kernel, m, k, n = kernel_for(name, dtype), 150, 300, 270
    a, b = kernel.prepare_a(normal((m, k), 1, dtype)), kernel.prepare_b(normal((k, n), 2, dtype))
    shape = {"row": (1, n), "column": (m, 1), "number": (1, 1)}.get(how, (m, n))
    c0 = on_gpu(8 * normal(shape, 4), how if how in STRIDES else "C", of)
    d = kernel.multiply(a, b, None)
    agree(kernel.multiply(a, b, None, alpha=0.7, beta=0.3, c0=c0), kernel.finish(d, 0.7, 0.3, c0, "f4"))


@pytest.mark.parametrize("name", ["hopper", "fp16x3"])
@pytest.mark.parametrize("batch", [((3,), (), (3,)), ((2, 3), (3,), (3,)), ((2, 1), (1, 3), ()), ((1,), (4,), (4,))])
def test_batches_broadcast_with_their_c0(kernel_for, name, batch):
    dtype = BFLOAT16 if name == "hopper" else np.dtype("f4")
    kernel = kernel_for(name, dtype)
    of_a, of_b, of_c0 = batch
    a = kernel.prepare_a(normal((*of_a, 140, 300), 1, dtype))
    b, c0 = kernel.prepare_b(normal((*of_b, 300, 130), 2, dtype)), on_gpu(normal((*of_c0, 140, 130), 3))
    d = kernel.multiply(a, b, None)
    agree(kernel.multiply(a, b, None, alpha=-1, beta=2, c0=c0), kernel.finish(d, -1, 2, c0, "f4"))


def test_operations_are_not_fused_and_zeros_infinities_and_nan_are_as_in_passes(kernel_for):
    kernel = kernel_for("hopper", "float16")
    a = np.zeros((4, 8), "f2")
    a[:, 0] = [1, 3, np.inf, np.nan]
    b = np.full((8, 4), 1, "f2")
    c0 = np.array([[-0.1, np.inf, np.nan, -0.0]] * 4, "f4")
    a_, b_ = kernel.prepare_a(a), kernel.prepare_b(b)
    for alpha, beta in ((0.1, 1.0), (0.0, 1.0), (-0.0, 1.0), (-0.1, 3.0), (1.0, 0.1)):
        fused = kernel.multiply(a_, b_, None, alpha=alpha, beta=beta, c0=on_gpu(c0)).get()
        want = kernel.finish(kernel.multiply(a_, b_, None), alpha, beta, on_gpu(c0), "f4").get()
        np.testing.assert_array_equal(fused, want)
        with np.errstate(invalid="ignore"):
            d = kernel.multiply(a_, b_, None).get()
            np.testing.assert_array_equal(fused, np.float32(alpha) * d + np.float32(beta) * c0)
        np.testing.assert_array_equal(np.signbit(fused[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))


def test_a_guard_that_fires_is_finished_in_passes(kernel_for, monkeypatch):
    kernel = kernel_for("fp16x3", "float32")
    a = normal((200, 600), 1)
    a[:, ::2] *= 2.0**-60
    a_, b_, c0 = kernel.prepare_a(a), kernel.prepare_b(normal((600, 130), 2)), on_gpu(normal((200, 130), 3))
    want = kernel.finish(kernel.multiply(a_, b_, None), 0.3, 0.7, c0, "f4")
    seen = passes(kernel, monkeypatch)
    agree(kernel.multiply(a_, b_, None, alpha=0.3, beta=0.7, c0=c0), want)
    fresh = kernel.prepare_a(a, wait=False)  # whose guards have perhaps not arrived
    agree(kernel.multiply(fresh, b_, None, alpha=0.3, beta=0.7, c0=c0), want)
    assert len(seen) == 2


def test_products_that_are_cut_into_slices_are_finished_in_passes(kernel_for, monkeypatch):
    kernel = kernel_for("hopper", "float16")
    k = 8 * STRETCH
    a, b = kernel.prepare_a(normal((100, k), 1, "f2")), kernel.prepare_b(normal((k, 90), 2, "f2"))
    c0 = on_gpu(normal((100, 90), 3))
    want = kernel.finish(kernel.multiply(a, b, None), 0.3, 0.7, c0, "f2")
    seen = passes(kernel, monkeypatch)
    agree(kernel.multiply(a, b, None, alpha=0.3, beta=0.7, c0=c0, dtype="f2"), want)
    assert len(seen) == 1

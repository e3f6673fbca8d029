"""int32 and int64 products by residues, on a real GPU: exact modulo 2^32 and 2^64, whatever the numbers and layouts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distmm_kernels.config import Problem, compute_dtype
from distmm_kernels.emulation.formats import GRANULE, granules
from distmm_kernels.emulation.integers import SHORTEST, SYSTEMS, split_integers
from distmm_kernels.select import select
from tests.kernels.reference import integer_twin
from tests.kernels.reference.matrices import RAGGED_SHAPES, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

WIDTHS = pytest.mark.parametrize("bits", [32, 64])
ORDERS = ["C", "F", "offset", "every other", "reversed"]
SHAPES = [(1, 512), (3, 513), (31, 640), (33, 1025), (5, 4100), (2, 8192), (3, 8193), (2, 17000)]


@pytest.fixture
def kernel_for(hopper):
    def make(bits):
        return select(Problem(1, 1, 1, np.dtype(f"int{bits}")), hopper, name="integer_residues")

    return make


def drawn(shape, bits, seed=0, dtype=None):
    """Integers of any size, and the least one and the greatest more often than they come by chance."""
    info, rng = np.iinfo(dtype or f"int{bits}"), np.random.default_rng(seed)
    numbers = rng.integers(info.min, info.max, shape, info.dtype, endpoint=True)
    numbers[rng.random(shape) < 0.05] = info.min
    numbers[rng.random(shape) < 0.05] = info.max
    return numbers


def multiply(kernel, a, b, c=None):
    """Multiply where freed memory holds -77s, so that an element left unwritten shows."""
    import cupy

    a, b = kernel.prepare_a(a), kernel.prepare_b(b)
    size = max(1, int(np.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2])))) * a.shape[-2] * (b.shape[-1] + 4)
    poison = cupy.full(size, -77, kernel.accumulator)
    del poison
    return kernel.multiply(a, b, c)


@WIDTHS
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_residues_are_those_of_the_twin(hopper, bits, order, shape):
    import cupy

    values = drawn((2, *shape), bits)
    residues = split_integers(on_gpu(values, order), bits, hopper)
    for index, z in itertools.product(range(granules(shape[1])), range(2)):
        stack = residues.granule(index, z)
        there = cupy.ndarray(
            stack.shape, np.int8, residues.memory + (stack.address - residues.memory.ptr), stack.strides
        )
        want = integer_twin.split(values[z, :, index * GRANULE : (index + 1) * GRANULE])
        np.testing.assert_array_equal(there.get(), want)


@WIDTHS
@pytest.mark.parametrize(
    "shape", [*RAGGED_SHAPES, (1, 1, 1), (1, 512, 1), (127, 512, 191), (128, 640, 256), (129, 1001, 257), (300, 511, 5)]
)
def test_every_ragged_shape_is_exact(kernel_for, bits, shape):
    m, k, n = shape
    kernel = kernel_for(bits)
    a, b, c = drawn((m, k), bits, 1), drawn((k, n), bits, 2), drawn((m, n), bits, 3)
    d = multiply(kernel, a, b)
    assert d.dtype == a.dtype
    np.testing.assert_array_equal(d.get(), a @ b)
    for order in ("C", "F", "every other"):
        np.testing.assert_array_equal(multiply(kernel, a, b, on_gpu(c, order)).get(), a @ b + c)


@WIDTHS
@pytest.mark.parametrize("k", [GRANULE, 2 * GRANULE + 700])
def test_the_least_integers_alone_and_deep_k_are_exact_and_any_cut_of_k_leaves_the_bits(kernel_for, bits, k):
    kernel = kernel_for(bits)
    a, b, c = drawn((140, k), bits, 1), drawn((k, 270), bits, 2), drawn((140, 270), bits, 3)
    least = np.iinfo(a.dtype).min
    a[3], b[:, 5] = least, least
    whole = multiply(kernel, a, b, on_gpu(c)).get()
    np.testing.assert_array_equal(whole, integer_twin.product(a, b, c))
    np.testing.assert_array_equal(whole[:9], a[:9] @ b + c[:9])
    for cuts in ((0, 1, 700, k), (0, GRANULE - 5, k)):
        d = on_gpu(c)
        for first, last in itertools.pairwise(cuts):
            d = multiply(kernel, a[:, first:last], b[first:last], d)
        np.testing.assert_array_equal(d.get(), whole)


@WIDTHS
@pytest.mark.parametrize("order_a", ORDERS)
@pytest.mark.parametrize("order_b", ORDERS)
def test_operands_may_lie_anyhow(kernel_for, bits, order_a, order_b):
    kernel = kernel_for(bits)
    a, b = drawn((203, 817), bits, 1), drawn((817, 150), bits, 2)
    np.testing.assert_array_equal(multiply(kernel, on_gpu(a, order_a), on_gpu(b, order_b)).get(), a @ b)


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint32", "uint64"])
def test_other_integers_have_numpys_bits(gpu, kernel_for, dtype):
    a, b, c0 = (drawn(shape, 0, i, dtype) for i, shape in enumerate(((70, 600), (600, 90), (70, 90))))
    kernel = kernel_for(8 * compute_dtype(dtype).itemsize)
    d = multiply(kernel, a, b)
    np.testing.assert_array_equal(kernel.finish(d, 1, 0, None, dtype).get(), a @ b)
    np.testing.assert_array_equal(kernel.finish(d, 3, 1, on_gpu(c0), dtype).get(), (a @ b) * np.array(3, dtype) + c0)


@WIDTHS
@pytest.mark.parametrize(
    ("batch_a", "batch_b"), [((3,), (3,)), ((), (4,)), ((2, 1), (3,)), ((5, 1, 2), (2,)), ((0,), ())]
)
@pytest.mark.parametrize("k", [70, 600])
def test_batches_broadcast(kernel_for, bits, batch_a, batch_b, k):
    a, b = drawn((*batch_a, 70, k), bits, 1), drawn((*batch_b, k, 90), bits, 2)
    d = multiply(kernel_for(bits), a, b)
    np.testing.assert_array_equal(d.get(), a @ b)
    np.testing.assert_array_equal(multiply(kernel_for(bits), a, b, d).get(), a @ b * np.array(2, a.dtype))


@WIDTHS
@pytest.mark.parametrize("shape", [(0, 600, 5), (5, 600, 0), (5, 0, 7)])
def test_empty_products(kernel_for, bits, shape):
    m, k, n = shape
    c = drawn((m, n), bits)
    d = multiply(kernel_for(bits), np.empty((m, k), c.dtype), np.empty((k, n), c.dtype), on_gpu(c))
    np.testing.assert_array_equal(d.get(), c)


@WIDTHS
def test_every_tile_of_a_large_c_is_right_in_one_strip_and_in_many(kernel_for, monkeypatch, bits):
    from distmm_kernels.gemm import residue_products

    kernel, (m, k, n) = kernel_for(bits), (3000, 1024, 2900)
    a, b, c = (on_gpu(drawn(shape, bits, i)) for i, shape in enumerate(((m, k), (k, n), (m, n))))
    plain = select(Problem(m, k, n, kernel.dtype), kernel.device, name="register_tiled")
    want = plain.multiply(plain.prepare_a(a), plain.prepare_b(b), c)
    for workspace in (residue_products.WORKSPACE, 1 << 20, 1):
        monkeypatch.setattr(residue_products, "WORKSPACE", workspace)
        for _ in range(3):
            assert bool((multiply(kernel, a, b, c) == want).all())


@WIDTHS
def test_neither_c_nor_the_operands_are_written_and_they_take_what_plans_count(kernel_for, bits):
    kernel = kernel_for(bits)
    a, b, c = (on_gpu(drawn(shape, bits, i)) for i, shape in enumerate(((150, GRANULE), (GRANULE, 170), (150, 170))))
    before = [x.copy() for x in (a, b, c)]
    multiply(kernel, a, b, c)
    assert all((x == y).all() for x, y in zip((a, b, c), before, strict=True))
    assert kernel.prepare_a(a).made.layout.end == -(-len(SYSTEMS[bits].moduli) * a.size // 256) * 256


def test_operands_of_another_kernel_are_refused(kernel_for):
    kernel, other = kernel_for(32), kernel_for(64)
    for k in (SHORTEST, 5):
        a, b = np.ones((5, k), "i4"), np.ones((k, 7), "i4")
        mine, message = (kernel.prepare_a(a), kernel.prepare_b(b)), "prepare it with this kernel first"
        for left, right in (
            (other.prepare_a(a), mine[1]),
            (mine[0], other.prepare_b(b)),
            (mine[0], on_gpu(b.astype("i8"))),
        ):
            with pytest.raises(TypeError, match=message):
                kernel.multiply(left, right, None)
    a, b = kernel.prepare_a(np.ones((5, 600), "i4")), kernel.prepare_b(np.ones((600, 7), "i4"))
    with pytest.raises(TypeError, match="b is array of int32, integer_residues multiplies residues of int32"):
        kernel.multiply(a, on_gpu(np.ones((600, 7), "i4")), None)
    with pytest.raises(TypeError, match="a is array of int32, integer_residues multiplies residues of int32"):
        kernel.multiply(on_gpu(np.ones((5, 600), "i4")), b, None)

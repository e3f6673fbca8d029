"""The kernels of `ldmatrix` and `mma.sync` on a real GPU: exact on integers of every shape, however they lie."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.layout.vectors import has_vectors
from distmm_kernels.tiles.fragment_tiles import SHARED, tilings
from tests.kernels.gemm.test_hopper_on_gpu import integers, normal, poisoned
from tests.kernels.reference import twins
from tests.kernels.reference.matrices import STRIDES, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ampere")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CASES = ["float16", "bfloat16", "int8", "tf32", "bf16 of float32"]
# around tiles of 64 x 64, 128 x 128 and 128 x 256, and stages of 16 to 64 steps of k
SHAPES = [
    (1, 1, 1), (1, 33, 1), (127, 63, 255), (128, 64, 256), (129, 65, 257), (128, 128, 64), (3, 500, 2), (200, 3, 1),
    (300, 129, 520), (64, 31, 1000), (513, 1025, 77),
]  # fmt: skip


@pytest.fixture
def kernel_for(ampere):
    from distmm_kernels.gemm.mma_sync import MmaSyncBf16Kernel, MmaSyncKernel, MmaSyncTf32Kernel

    classes = {"tf32": MmaSyncTf32Kernel, "bf16 of float32": MmaSyncBf16Kernel}

    def make(case):
        dtype = np.dtype("float32") if case in classes else BFLOAT16 if case == "bfloat16" else np.dtype(case)
        return classes.get(case, MmaSyncKernel)(Problem(1, 1, 1, dtype), ampere)

    return make


def prepared(kernel, a, b):
    return kernel.prepare_a(a.astype(kernel.dtype)), kernel.prepare_b(b.astype(kernel.dtype))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact_for_every_shape(kernel_for, monkeypatch, case, shape):
    m, k, n = shape
    kernel = kernel_for(case)
    a, b, c = integers((m, k), 1), integers((k, n), 2), integers((m, n), 3)
    seen = poisoned(kernel, monkeypatch)
    a_, b_ = prepared(kernel, a, b)
    assert (a_.shape, b_.shape) == ((m, k), (k, n))
    d = kernel.multiply(a_, b_, None)
    assert d.dtype == kernel.accumulator
    np.testing.assert_array_equal(d.get(), a @ b)
    np.testing.assert_array_equal(kernel.multiply(a_, b_, on_gpu(c, dtype=kernel.accumulator)).get(), a @ b + c)
    for whole, view in seen:  # what lies between the rows of a result is not written
        outside = whole[..., view.shape[-1] :].view("uint8")
        assert (outside == outside[..., :1]).all()


@pytest.mark.parametrize("gpu_model", [(8, 0), (8, 6), (9, 0)])
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_every_tiling_is_exact_in_both_orders(kernel_for, ampere, monkeypatch, case, gpu_model, size):
    if SHARED.get(gpu_model, 99) > SHARED.get(ampere.compute_capability, 99):
        pytest.skip(f"{ampere} has too little shared memory")
    kernel = kernel_for(case)

    def only_one(self, a, b):
        return 2 * (tilings(self.kind, gpu_model, (has_vectors(a, -1), has_vectors(b, -2)))[size],)

    monkeypatch.setattr(type(kernel), "_tilings", only_one)
    for (m, k, n), orders in itertools.product([(261, 77, 390), (520, 300, 515)], itertools.product("CF", repeat=2)):
        a, b = integers((m, k), 1), integers((k, n), 2)
        placed = (on_gpu(x, order, kernel.dtype) for x, order in zip((a, b), orders, strict=True))
        a_, b_ = (prepare(x) for prepare, x in zip((kernel.prepare_a, kernel.prepare_b), placed, strict=True))
        np.testing.assert_array_equal(kernel.multiply(a_, b_, None).get(), a @ b)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order_a", STRIDES)
@pytest.mark.parametrize("order_b", STRIDES)
def test_operands_and_c_may_lie_anyhow(kernel_for, case, order_a, order_b):
    m, k, n = 150, 100, 270
    kernel = kernel_for(case)
    shapes = ((m, k), order_a), ((k, n), order_b)
    a, b = (on_gpu(integers(shape, i), order, kernel.dtype) for i, (shape, order) in enumerate(shapes))
    c = on_gpu(integers((m, n), 3), order_b, kernel.accumulator)
    expected = a.astype("f8").get() @ b.astype("f8").get() + c.get()
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), c)
    np.testing.assert_array_equal(d.get(), expected)


@pytest.mark.parametrize("case", ["bfloat16", "int8", "tf32"])
@pytest.mark.parametrize(
    ("batch_a", "batch_b"),
    [((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 1), (1, 3)), ((2, 3), (3,)), ((0,), ()), ((1,), (4,))],
)
def test_batches_broadcast(kernel_for, case, batch_a, batch_b):
    kernel = kernel_for(case)
    a, b = integers((*batch_a, 140, 70), 1), integers((*batch_b, 70, 130), 2)
    expected = a @ b
    c = integers(expected.shape, 3)
    a_, b_ = prepared(kernel, a, b)
    np.testing.assert_array_equal(kernel.multiply(a_, b_, None).get(), expected)
    np.testing.assert_array_equal(kernel.multiply(a_, b_, on_gpu(c, dtype=kernel.accumulator)).get(), expected + c)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("starts", [False, True])
def test_bits_do_not_depend_on_cuts_of_k_nor_on_the_run(kernel_for, case, starts):
    m, k, n = 130, 2 * GRANULE + 100, 66
    kernel = kernel_for(case)
    factor = 30 if case == "int8" else 1
    a, b = ((factor * normal(s, i)).astype(kernel.dtype) for i, s in enumerate(((m, k), (k, n))))
    c = on_gpu(integers((m, n), 3), dtype=kernel.accumulator) if starts else None
    whole = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), c)
    assert (kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), c) == whole).all()
    for cuts in ([GRANULE], [GRANULE, 2 * GRANULE]):
        d = c
        for first, last in zip([0, *cuts], [*cuts, k], strict=True):
            d = kernel.multiply(kernel.prepare_a(a[:, first:last]), kernel.prepare_b(b[first:last]), d)
        assert (d == whole).all()


@pytest.mark.parametrize("case", ["float16", "bfloat16"])
def test_bits_do_not_depend_on_how_operands_lie_nor_on_the_tiling(kernel_for, monkeypatch, case):
    kernel = kernel_for(case)
    a, b = (on_gpu(normal(shape, i), dtype=kernel.dtype) for i, shape in enumerate(((300, 1000), (1000, 500))))
    first = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)
    for gpu_model, size in itertools.product(((8, 0), (8, 6)), (0, 1)):
        tiling = tilings(kernel.kind, gpu_model, (False, True))[size]
        monkeypatch.setattr(type(kernel), "_tilings", lambda self, a, b, tiling=tiling: (tiling, tiling))
        kernel._launches.clear()
        d = kernel.multiply(kernel.prepare_a(a.T.copy().T), kernel.prepare_b(b.T.copy().T), None)
        assert (d == first).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [GRANULE, 1 << 18])
def test_sums_leave_the_tensor_cores_after_each_granule(kernel_for, case, k):
    """Products are exact and each of k / 8 sums of a granule is truncated to float32 at worst; granules are rounded."""
    kernel = kernel_for(case)
    if case == "int8":
        pytest.skip("exact, which the integers show")
    a, b = (np.abs(normal(s, i)) for i, s in enumerate(((64, k), (k, 48))))  # positive: truncation adds up
    a, b = a.astype(kernel.dtype), b.astype(kernel.dtype)
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None).get()
    exact = a.astype("f8") @ b.astype("f8")
    rounding, step = {"tf32": (2.0**-11, 4), "bf16 of float32": (2.0**-9, 8)}.get(case, (0.0, 8))
    bound = (2 * rounding + rounding**2 + GRANULE / step * 2.0**-23 + k / GRANULE * 2.0**-24) * exact  # |A||B| = AB
    assert (np.abs(d - exact) <= bound).all()


def test_sums_of_int8_wrap_around(kernel_for):
    kernel, k = kernel_for("int8"), 3 * (1 << 17)
    a, b = np.full((3, k), -128, "i1"), np.full((k, 2), -128, "i1")
    want = np.full((3, 2), 128 * 128 * k).astype("i4")  # modulo 2^32
    np.testing.assert_array_equal(kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None).get(), want)


@pytest.mark.parametrize("case", CASES)
def test_infinities_and_nan_go_where_they_belong(kernel_for, case):
    kernel = kernel_for(case)
    if case == "int8":
        pytest.skip("has neither")
    a, b = np.ones((4, 70), kernel.dtype), np.ones((70, 5), kernel.dtype)
    a[1, 3], a[2, 69], a[3, 0] = np.inf, np.nan, 60416  # which 8 bits hold
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None).get()
    np.testing.assert_array_equal(d, np.array([70, np.inf, np.nan, 60416 + 69])[:, None] * np.ones((4, 5)))


@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize("shape", [(261, 77, 390), (129, 33, 1), (3, 1, 200)])
def test_16_bits_are_multiplied_where_they_lie_and_nothing_beside_them_is(kernel_for, orders, shape):
    """Every other line of a matrix is NaN, and so is what lies between the end of a line and the next."""
    import cupy

    kernel = kernel_for("bfloat16")

    def amid_nan(values, order):
        lines = values if order == "C" else values.T
        whole = cupy.empty((2 * len(lines), (lines.shape[1] // 8 + 2) * 8), "u2")
        whole[...] = 0x7FC1
        placed = whole.view(BFLOAT16)[::2, : lines.shape[1]]
        placed[...] = cupy.asarray(lines).astype(BFLOAT16)
        return placed if order == "C" else placed.T

    m, k, n = shape
    a, b = integers((m, k), 1), integers((k, n), 2)
    placed = amid_nan(a, orders[0]), amid_nan(b, orders[1])
    a_, b_ = kernel.prepare_a(placed[0]), kernel.prepare_b(placed[1])
    assert [x.data.ptr for x in (a_, b_)] == [x.data.ptr for x in placed]
    np.testing.assert_array_equal(kernel.multiply(a_, b_, None).get(), a @ b)


@pytest.mark.parametrize("case", CASES)
def test_every_tile_of_a_large_c_is_added(kernel_for, case):
    kernel = kernel_for(case)
    m, k, n = 8192, 512, 8188
    a, b = (on_gpu(integers(shape, i), dtype=kernel.dtype) for i, shape in enumerate(((m, k), (k, n))))
    a_, b_, c = kernel.prepare_a(a), kernel.prepare_b(b), on_gpu(integers((m, n), 3), dtype=kernel.accumulator)
    want = kernel.multiply(a_, b_, None) + c
    for _ in range(3):
        assert bool((kernel.multiply(a_, b_, c) == want).all())


@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_plain_multiply_adds(kernel_for, case):
    """N(0, 1), so that each bit of the operands counts."""
    kernel = kernel_for(case)
    a, b = (on_gpu((20 * normal(s, i)).astype(kernel.dtype)) for i, s in enumerate(((700, 600), (600, 900))))
    a_, b_ = kernel.prepare_a(a), kernel.prepare_b(b)
    read = [getattr(x, "made", x).astype("f8").get() for x in (a_, b_)]
    d, want, size = kernel.multiply(a_, b_, None).get(), read[0] @ read[1], np.abs(read[0]) @ np.abs(read[1])
    assert (np.abs(d - want) <= 600 / 4 * 2.0**-23 * size * (case != "int8")).all()


def test_operands_of_another_kernel_are_refused(kernel_for):
    kernel, other = kernel_for("tf32"), kernel_for("bf16 of float32")
    block = np.ones((8, 8), "f4")
    with pytest.raises(TypeError, match="prepare it with this kernel"):
        kernel.multiply(other.prepare_a(block), other.prepare_b(block), None)
    with pytest.raises(TypeError, match="prepare it with this kernel"):
        kernel.multiply(block, block, None)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["C", "F"])
def test_offsets_beyond_two_to_the_31_are_read(kernel_for, ampere, order):
    import cupy

    m, k = 2**24 + 3, 136
    if ampere.memory < 16 * m * k:
        pytest.skip(f"needs {16 * m * k / 2**30:.0f} GiB of GPU memory, {ampere.memory / 2**30:.0f} are there")
    a = cupy.empty((m, k), "f2", order=order)
    a[...] = (cupy.arange(m) % 50)[:, None]
    kernel = kernel_for("float16")
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(cupy.ones((k, 3), "f2")), None)
    assert bool((d == k * a[:, :3].astype("f4")).all())


def test_float32_is_rounded_to_tf32_whatever_its_layout(kernel_for):
    import cupy

    kernel, x = kernel_for("tf32"), normal((65, 130), 1)
    x[0, :4] = np.inf, -np.inf, 0, np.nan
    for block in (cupy.asarray(x), cupy.asfortranarray(cupy.asarray(x)), cupy.asarray(x)[::-1][::-1]):
        for prepared_, want in ((kernel.prepare_a(block), x), (kernel.prepare_b(block.T), x.T)):
            np.testing.assert_array_equal(prepared_.made.get(), twins.round_tf32(want))

"""The kernels for Hopper's tensor cores on a real GPU: exact on integers, whatever the shape and however they lie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.tiles.hopper_tiles import STRETCH
from tests.kernels.reference import twins
from tests.kernels.reference.matrices import STRIDES, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CASES = ["float16", "bfloat16", "int8", "uint8", "bool", "tf32", "bf16 of float32"]
# around a tile of 128 x 256 and a stage of 32 to 128 steps of k
SHAPES = [
    (1, 1, 1), (1, 33, 1), (127, 63, 255), (128, 64, 256), (129, 65, 257), (128, 128, 64), (3, 500, 2), (200, 3, 1),
    (300, 129, 520), (64, 31, 1000), (513, 1025, 77), (200, 8192, 264), (200, 8193, 264), (130, 16385, 70),
]  # fmt: skip


@pytest.fixture
def kernel_for(hopper):
    from distmm_kernels.gemm.hopper import HopperKernel
    from distmm_kernels.gemm.hopper_rounded import HopperBf16Kernel, HopperTf32Kernel

    classes = {"tf32": HopperTf32Kernel, "bf16 of float32": HopperBf16Kernel}

    def make(case):
        dtype = np.dtype("float32") if case in classes else BFLOAT16 if case == "bfloat16" else np.dtype(case)
        return classes.get(case, HopperKernel)(Problem(1, 1, 1, dtype), hopper)

    return make


def integers(shape, seed, dtype=np.float64):
    """Small enough that every sum of products below is exact in float32, and every one of them in bfloat16.

    Of uint8 they are up to 255: sums below 2^31.
    """
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


def exact(a, b):
    """The product, of integers as they are."""
    return a.astype(np.float64) @ b.astype(np.float64)


def poisoned(kernel, monkeypatch):
    """Let results begin as NaN, or as -77: an element left unwritten shows. Returns what surrounds them."""
    empty, seen = type(kernel)._empty, []

    def full(self, shape, dtype):
        d = empty(self, shape, dtype)
        whole = d if d.base is None else d.base
        whole.view("uint8")[...] = 0xFF if dtype.kind != "i" else 179
        seen.append((whole, d))
        return d

    monkeypatch.setattr(type(kernel), "_empty", full)
    return seen


@pytest.mark.parametrize(("case", "k"), [*((case, 512) for case in CASES), ("bfloat16", STRETCH + 64), ("tf32", 8232)])
def test_every_tile_of_a_large_c_is_added(kernel_for, case, k):
    """Each block has 15 tiles or more: C of the next one comes while this one's is read (tests above have 1 or 2)."""
    kernel = kernel_for(case)
    m, n = 8192, 8188
    a, b = (on_gpu(integers(shape, i, kernel.dtype)) for i, shape in enumerate(((m, k), (k, n))))
    a_, b_, c = kernel.prepare_a(a), kernel.prepare_b(b), on_gpu(integers((m, n), 3), dtype=kernel.accumulator)
    want = kernel.multiply(a_, b_, None) + c
    for _ in range(3):
        assert bool((kernel.multiply(a_, b_, c) == want).all())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact_for_every_shape(kernel_for, monkeypatch, case, shape):
    m, k, n = shape
    kernel = kernel_for(case)
    a, b, c = integers((m, k), 1, kernel.dtype), integers((k, n), 2, kernel.dtype), integers((m, n), 3)
    seen = poisoned(kernel, monkeypatch)
    a_, b_ = kernel.prepare_a(a), kernel.prepare_b(b)
    assert a_.shape == (m, k)
    assert b_.shape == (k, n)
    d = kernel.multiply(a_, b_, None)
    assert d.dtype == kernel.accumulator
    np.testing.assert_array_equal(d.get(), exact(a, b))
    added = kernel.multiply(a_, b_, on_gpu(c, dtype=kernel.accumulator))
    np.testing.assert_array_equal(added.get(), exact(a, b) + c)
    for whole, view in seen:  # what lies between the rows of a result is not written
        outside = whole[..., view.shape[-1] :].view("uint8")
        assert (outside == outside[..., :1]).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order_a", STRIDES)
@pytest.mark.parametrize("order_b", STRIDES)
def test_operands_and_c_may_lie_anyhow(kernel_for, case, order_a, order_b):
    m, k, n = 150, 100, 270
    kernel = kernel_for(case)
    a, b = (
        on_gpu(integers(s, i, kernel.dtype), order)
        for i, (s, order) in enumerate((((m, k), order_a), ((k, n), order_b)))
    )
    c = on_gpu(integers((m, n), 3), order_b, kernel.accumulator)
    expected = exact(a.get(), b.get()) + c.get()
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), c)
    np.testing.assert_array_equal(d.get(), expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("batch_a", "batch_b"),
    [((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 1), (1, 3)), ((2, 3), (3,)), ((0,), ()), ((1,), (4,))],
)
def test_batches_broadcast(kernel_for, case, batch_a, batch_b):
    kernel = kernel_for(case)
    a, b = integers((*batch_a, 140, 70), 1, kernel.dtype), integers((*batch_b, 70, 130), 2, kernel.dtype)
    expected = exact(a, b)
    c = integers(expected.shape, 3)
    a_, b_ = kernel.prepare_a(a), kernel.prepare_b(b)
    np.testing.assert_array_equal(kernel.multiply(a_, b_, None).get(), expected)
    np.testing.assert_array_equal(kernel.multiply(a_, b_, on_gpu(c, dtype=kernel.accumulator)).get(), expected + c)


def normal(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(300, 2 * STRETCH + 1000, 500), (130, 3 * STRETCH, 66), (1100, STRETCH + 8, 900)])
def test_bits_do_not_depend_on_how_k_is_cut_nor_on_the_run(kernel_for, case, shape):
    m, k, n = shape
    kernel = kernel_for(case)
    exactly = kernel.accumulator.kind == "i"
    a, b = (normal(s, i) for i, s in enumerate(((m, k), (k, n))))
    a, b = ((30 * x).astype("i8").astype(kernel.dtype) if exactly else x.astype(kernel.dtype) for x in (a, b))
    whole = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)
    assert (kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None) == whole).all()
    granule = 64 if exactly else kernel.granule  # half a stage
    for cuts in ([granule], list(range(granule, k, granule))[:30]):
        d = None
        for first, last in zip([0, *cuts], [*cuts, k], strict=True):
            d = kernel.multiply(kernel.prepare_a(a[:, first:last]), kernel.prepare_b(b[first:last]), d)
        assert (d == whole).all()


@pytest.mark.parametrize("k", [4096, 2**17 + 40])
@pytest.mark.parametrize("case", ["float16", "bfloat16", "tf32", "bf16 of float32"])
def test_errors_are_those_of_the_operands_type_and_of_a_truncated_stretch(kernel_for, case, k):
    """Products are exact, and each of K / 8 sums of a stretch is cut off (MMA-Sim, arXiv 2511.10909)."""
    kernel = kernel_for(case)
    a, b = (np.abs(normal(s, i)) for i, s in enumerate(((130, k), (k, 300))))  # positive: truncation adds up
    a, b = a.astype(kernel.dtype), b.astype(kernel.dtype)
    a_, b_ = kernel.prepare_a(a), kernel.prepare_b(b)
    d = kernel.multiply(a_, b_, None).get()
    exact = a.astype("f8") @ b.astype("f8")
    rounding = {"tf32": 2.0**-11, "bf16 of float32": 2.0**-9}.get(case, 0.0)
    cut_off = min(k, STRETCH) / 8 * 2.0**-23 + -(-k // STRETCH) * 2.0**-24
    bound = (2 * rounding + rounding**2 + cut_off) * exact  # a and b are positive: |A||B| = AB
    assert (np.abs(d - exact) <= bound).all()
    added = kernel.multiply(a_, b_, on_gpu(d)).get()
    assert (np.abs(added - exact - d) <= bound + 2.0**-24 * (d + exact)).all()


@pytest.mark.parametrize("case", ["float16", "bfloat16", "tf32"])
@pytest.mark.parametrize("adds", [False, True])
def test_bits_are_those_of_the_twin(kernel_for, case, adds):
    kernel, k = kernel_for(case), 2 * STRETCH + 328
    a, b, c = normal((17, k), 1).astype(kernel.dtype), normal((k, 24), 2).astype(kernel.dtype), normal((17, 24), 3)
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), on_gpu(c) if adds else None)
    np.testing.assert_array_equal(d.get(), twins.one_product(a, b, c if adds else None))


@pytest.mark.parametrize("case", ["float16", "bfloat16", "tf32"])
@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float64"])
@pytest.mark.parametrize("n", [256, 77])
def test_the_last_step_may_round_as_it_writes(kernel_for, case, dtype, n):
    kernel = kernel_for(case)
    a, b, c = normal((200, 300), 1), normal((300, n), 2), normal((200, n), 3)
    a_, b_, c = (
        kernel.prepare_a(a.astype(kernel.dtype)),
        kernel.prepare_b(b.astype(kernel.dtype)),
        on_gpu(c, dtype="f4"),
    )
    rounded = kernel.multiply(a_, b_, c, dtype=dtype)
    finished = kernel.finish(kernel.multiply(a_, b_, c), 1, 0, None, dtype)
    assert rounded.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(rounded.astype("f4").get(), finished.astype("f4").get())


@pytest.mark.parametrize("c", [None, 0, -1])
def test_sums_of_uint8_wrap_around_and_counts_of_bools_do_not(kernel_for, c):
    k = 2**32 // 255**2 + 4  # sums of 255 * 255 exceed 2^32, also with c = -1
    kernel, a, b = kernel_for("uint8"), np.full((130, k), 255, "u1"), np.full((k, 70), 255, "u1")
    c0 = None if c is None else on_gpu(np.full((130, 70), c), dtype=kernel.accumulator)
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), c0)
    total = 255 * 255 * k + (c or 0)
    assert total >= 2**32
    assert (d.get() == np.array(total).astype("i4")).all()
    assert (kernel.finish(d, 1, 0, None, "u1").get() == total % 256).all()
    kernel = kernel_for("bool")
    c0 = None if c is None else on_gpu(np.full((130, 70), 2**32 - k), dtype=kernel.accumulator)
    a_, b_ = kernel.prepare_a(a != 0), kernel.prepare_b(b != 0)
    assert (kernel.multiply(a_, b_, c0).get() == (k if c is None else 2**32)).all()
    assert kernel.multiply(a_, b_, c0, dtype=bool).get().all()


@pytest.mark.parametrize("dtype", ["int64", "bool"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_bools_are_counted_in_parts_of_c(kernel_for, monkeypatch, dtype, batch):
    from distmm_kernels.gemm import hopper

    kernel, rng = kernel_for("bool"), np.random.default_rng(0)
    a, b = rng.random((*batch, 300, 500)) < 0.1, rng.random((500, 260)) < 0.1
    counts = exact(a, b)
    c = rng.integers(-9, 10, counts.shape)
    c[..., 5, 7] = -counts[..., 5, 7]
    a_, b_ = kernel.prepare_a(a), kernel.prepare_b(b)
    for workspace in (1, 12 * 288 * 200, hopper.WORKSPACE):
        monkeypatch.setattr(hopper, "WORKSPACE", workspace)
        for added in (None, c):
            want = counts if added is None else counts + added
            d = kernel.multiply(a_, b_, added if added is None else on_gpu(added), dtype=dtype)
            assert d.dtype == dtype
            np.testing.assert_array_equal(d.get(), want.astype(dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_product_of_bools_alone_is_true_where_a_term_is(kernel_for, monkeypatch, shape, batch):
    kernel, (m, k, n), rng = kernel_for("bool"), shape, np.random.default_rng(0)
    share = min(0.5, 0.8 / k**0.5)  # about half of the sums are zero
    a, b = rng.random((*batch, m, k)) < share, rng.random((k, n)) < share
    poisoned(kernel, monkeypatch)
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None, dtype=bool)
    assert d.dtype == bool
    np.testing.assert_array_equal(d.get().view("u1"), exact(a, b) != 0)  # bytes of 0 and 1


@pytest.mark.parametrize("n", [1, 3, 15, 16, 17, 255, 1001])
@pytest.mark.parametrize("dtype", ["uint8", "bool"])
def test_stores_of_bytes_stay_in_their_rows_of_whole_vectors(kernel_for, monkeypatch, dtype, n):
    """Nothing before, after or beside D is written; what completes a row to 16 bytes belongs to D."""
    import cupy

    kernel, pitch, around = kernel_for(dtype), -(-n // 16) * 16 + 32, []

    def between(self, shape, to):
        around.append(cupy.full((shape[0] + 2, pitch), 0xFF, "u1"))
        return around[-1][1:-1, 16 : 16 + n].view(to)

    a, b = np.ones((130, 70), dtype), np.ones((70, n), dtype)
    a_, b_ = kernel.prepare_a(a), kernel.prepare_b(b)
    monkeypatch.setattr(type(kernel), "_empty", between)
    d = kernel.multiply(a_, b_, None, dtype=dtype)
    assert (d.get() == (70 if dtype == "uint8" else 1)).all()
    (whole,) = around
    assert (whole[[0, -1]] == 0xFF).all()
    assert (whole[:, :16] == 0xFF).all()
    assert (whole[:, pitch - 16 :] == 0xFF).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("to", ["int8", "uint8"])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 5 * STRETCH + 3, 500)])
@pytest.mark.parametrize("adds", [False, True])
def test_sums_are_stored_as_8_bits_that_wrap_around(kernel_for, monkeypatch, dtype, to, shape, adds):
    kernel, (m, k, n), rng = kernel_for(dtype), shape, np.random.default_rng(0)
    a, b = (rng.integers(0, 256, s).astype("u1").view(dtype) for s in ((m, k), (k, n)))
    c = rng.integers(-(2**31), 2**31, (m, n)).astype("i4") if adds else None
    a_, b_ = kernel.prepare_a(a), kernel.prepare_b(b)
    c_ = on_gpu(c) if adds else None
    want = kernel.multiply(a_, b_, c_).get().astype(to)
    poisoned(kernel, monkeypatch)
    d = kernel.multiply(a_, b_, c_, dtype=to)
    assert d.dtype == to
    np.testing.assert_array_equal(d.get(), want)


def test_infinities_and_nan_go_where_they_belong(kernel_for):
    kernel = kernel_for("float16")
    a, b = np.ones((4, 70), "f2"), np.ones((70, 5), "f2")
    a[1, 3], a[2, 69], a[3, 0] = np.inf, np.nan, 65504
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None).get()
    np.testing.assert_array_equal(d, np.array([70, np.inf, np.nan, 65504 + 69])[:, None] * np.ones((4, 5)))


# aligned rows are rounded by the accelerator, those that begin anywhere, and columns, by the copy
TF32_LAYOUTS = ("C", "offset", "F", "every other")


def test_tf32_operands_are_rounded_alike_however_they_lie(kernel_for):
    """Halves between two TF32 numbers, which ``cvt.rna`` and the accelerator round to different sides."""
    kernel = kernel_for("tf32")
    rng = np.random.default_rng(1)
    a = (rng.integers(1 << 10, 1 << 11, (130, 96)) + 0.5).astype("f4") * rng.choice([-1, 1], (130, 96)).astype("f4")
    one = np.eye(96, dtype="f4")
    expected = twins.nearest_tf32(a)
    assert (expected != twins.round_tf32(a)).mean() > 0.4
    for order in TF32_LAYOUTS:
        left = kernel.multiply(kernel.prepare_a(on_gpu(a, order)), kernel.prepare_b(one), None)
        np.testing.assert_array_equal(left.get(), expected)
        right = kernel.multiply(kernel.prepare_a(one), kernel.prepare_b(on_gpu(a.T, order)), None)
        np.testing.assert_array_equal(right.get(), expected.T)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF801000, 0x7FC00000, 0x7F800000, 0x7F7FFFFF])
@pytest.mark.parametrize("order", TF32_LAYOUTS)
def test_every_nan_and_what_rounds_to_infinity_stay_so_in_tf32(kernel_for, order, bits):
    """Rounding the bits as an integer would make the GPU's own NaN, 0x7FFFFFFF, a zero, and 0x7F800001 infinity."""
    kernel = kernel_for("tf32")
    a = np.ones((140, 72), "f4")
    a.view("u4")[3, 5] = bits
    for swap in (False, True):
        left, right = kernel.prepare_a(np.ones((9, 72), "f4")), kernel.prepare_b(on_gpu(a.T, order))
        if not swap:
            left, right = kernel.prepare_a(on_gpu(a, order)), kernel.prepare_b(np.ones((72, 9), "f4"))
        d = kernel.multiply(left, right, None).get()
        d = d.T if swap else d
        np.testing.assert_array_equal(d[3], np.full(9, np.nan if bits & 0x7FFFFFFF > 0x7F800000 else np.inf))
        np.testing.assert_array_equal(np.delete(d, 3, 0), np.full((139, 9), 72))


def test_legal_operands_are_not_copied(kernel_for):
    kernel = kernel_for("bfloat16")
    block = on_gpu(integers((64, 128), 1), dtype=BFLOAT16)
    for operand in (block, block.T, block[8:, 8:], block[:, 8:72]):
        for prepare in (kernel.prepare_a, kernel.prepare_b):
            assert [panel.data.ptr for panel in prepare(operand).made] == [operand.data.ptr]


def test_operands_of_another_kernel_are_refused(kernel_for):
    kernel, other = kernel_for("bfloat16"), kernel_for("float16")
    block = np.ones((8, 8))
    with pytest.raises(TypeError, match="prepare it with this kernel"):
        kernel.multiply(other.prepare_a(block.astype("f2")), other.prepare_b(block.astype("f2")), None)
    with pytest.raises(TypeError, match="prepare it with this kernel"):
        kernel.multiply(block, block, None)

"""Deep products of few tiles on a real GPU: slices of k have the bits of one sum after the other, in each kernel."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.gemm.aligned import AlignedKernel
from distmm_kernels.select import select
from distmm_kernels.tiles import slices
from distmm_kernels.tiles.hopper_tiles import STRETCH

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float16": np.dtype("float16"), "bfloat16": BFLOAT16, "int8": np.dtype("int8")}
CASES = pytest.mark.parametrize("case", [*DTYPES, "hopper_tf32", "hopper_bf16", "fp16x3", "tf32x3"])
# whole tiles, ragged ones, one element, many rows; the last slice full, nearly full, and of 8 steps
SHAPES = [
    (512, 8 * STRETCH, 512), (300, 3 * STRETCH + 1000, 261), (1, 2 * STRETCH + 8, 1), (129, 5 * STRETCH - 24, 77),
    (1030, 4 * STRETCH, 200),
]  # fmt: skip


@pytest.fixture
def kernel_for(hopper):
    def make(case):
        name, dtype = ("hopper", DTYPES[case]) if case in DTYPES else (case, np.dtype("float32"))
        return select(Problem(1, 1, 1, dtype), hopper, name=name)

    return make


@pytest.fixture
def added(monkeypatch):
    """How many sums each launch added to C. What results and sums are written to begins as NaN, or as -77."""
    counts, add, empty = [], AlignedKernel._add_slices, AlignedKernel._empty

    def counted(self, sums, c, d):
        counts.append(sums.shape[-3])
        add(self, sums, c, d)

    def poisoned(self, shape, dtype):
        made = empty(self, shape, dtype)
        whole = made if made.base is None else made.base
        whole.view("uint8")[...] = 0xFF if dtype.kind != "i" else 179
        return made

    monkeypatch.setattr(AlignedKernel, "_add_slices", counted)
    monkeypatch.setattr(AlignedKernel, "_empty", poisoned)
    return counts


def drawn(shape, dtype, seed):
    """Normally distributed numbers on the GPU."""
    import cupy

    values = cupy.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return (30 * values if dtype.kind == "i" else values).astype(dtype)


def prepared(kernel, m, k, n, batch_a=(), batch_b=()):
    dtype = kernel.dtype
    return kernel.prepare_a(drawn((*batch_a, m, k), dtype, 1)), kernel.prepare_b(drawn((*batch_b, k, n), dtype, 2))


def one_after_the_other(monkeypatch):
    return monkeypatch.setattr(slices, "at_once", lambda *sizes: 1)


def same(x, y):
    """The sign of a zero is not compared: `distmm_kernels.tiles.slices` says why it may differ."""
    return x.dtype == y.dtype and bool((x.astype("f8") == y.astype("f8")).all())


@CASES
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_have_the_bits_of_one_sum_after_the_other(kernel_for, added, monkeypatch, case, shape):
    m, k, n = shape
    kernel = kernel_for(case)
    a, b = prepared(kernel, m, k, n)
    c = drawn((m, n), kernel.accumulator, 3)
    narrow = "float64" if case in ("int8", "fp16x3", "tf32x3") else "float16"
    asked = ((None, None), (c, None), (None, narrow), (c, narrow))
    sliced = [kernel.multiply(a, b, start, dtype=dtype) for start, dtype in asked]
    assert len(added) == 4, "few tiles, deep k: each product is sliced"
    monkeypatch.setattr(slices, "at_once", lambda m, n, count, *others: min(2, count))
    in_runs = [kernel.multiply(a, b, start, dtype=dtype) for start, dtype in asked]
    assert set(added[4:]) <= {1, 2}
    added.clear()
    one_after_the_other(monkeypatch)
    for (start, dtype), first, second in zip(asked, sliced, in_runs, strict=True):
        whole = kernel.multiply(a, b, start, dtype=dtype)
        assert same(first, whole)
        assert same(second, whole)
    assert not added


@pytest.mark.parametrize("case", [*DTYPES, "hopper_tf32"])
@pytest.mark.parametrize(("batch_a", "batch_b"), [((3,), (3,)), ((3,), ()), ((), (4,)), ((2, 1), (3,))])
def test_matrices_of_a_batch_are_sliced_each(kernel_for, added, monkeypatch, case, batch_a, batch_b):
    kernel, (m, k, n) = kernel_for(case), (140, 3 * STRETCH + 72, 130)
    a, b = prepared(kernel, m, k, n, batch_a, batch_b)
    c = drawn((*np.broadcast_shapes(batch_a, batch_b), m, n), kernel.accumulator, 3)
    sliced = [kernel.multiply(a, b, start) for start in (None, c)]
    assert added
    one_after_the_other(monkeypatch)
    for start, found in zip((None, c), sliced, strict=True):
        assert same(found, kernel.multiply(a, b, start))


@CASES
def test_what_nobody_waits_for_is_not_overwritten_by_the_next_product(kernel_for, added, case):
    """The sums of each product go to memory that the one before has just given back."""
    import cupy

    kernel, stream = kernel_for(case), cupy.cuda.Stream(non_blocking=True)
    pairs = [prepared(kernel, 256, 4 * STRETCH, n) for n in (256, 100, 300)]
    expected = [kernel.multiply(*pair, None) for pair in pairs]
    added.clear()
    with stream:
        found = [kernel.multiply(*pair, None, wait=False) for pair in pairs * 3]
    stream.synchronize()
    assert len(added) == 9
    assert all(same(x, y) for x, y in zip(found, expected * 3, strict=True))


@CASES
def test_the_same_rows_of_a_large_product_have_the_same_bits(kernel_for, added, case):
    """The large one has tiles for all multiprocessors, and is not sliced."""
    kernel, k, n = kernel_for(case), 3 * STRETCH, 2048
    a, b = drawn((6000, k), kernel.dtype, 1), drawn((k, n), kernel.dtype, 2)
    large = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)
    assert not added
    small = kernel.multiply(kernel.prepare_a(a[128:228]), kernel.prepare_b(b[:, :200]), None)
    assert added == [3]
    assert same(small, large[128:228, :200])


@pytest.mark.parametrize("case", ["fp16x3", "tf32x3"])
@pytest.mark.parametrize("exponent", [30, 70])
def test_a_guarded_granule_interrupts_the_slices(kernel_for, added, monkeypatch, case, exponent):
    kernel, (m, k, n) = kernel_for(case), (200, 7 * STRETCH + 100, 170)
    a, b = drawn((m, k), np.dtype("f4"), 1), drawn((k, n), np.dtype("f4"), 2)
    a[7, 3 * STRETCH + 5 : 4 * STRETCH : 2] *= np.float32(2.0**-exponent)
    a[7, 3 * STRETCH + 4] = 2.0**exponent
    a, b = kernel.prepare_a(a), kernel.prepare_b(b)
    sliced = kernel.multiply(a, b, None)
    guarded = case == "fp16x3" or exponent > 60  # TF32 halves hold 2^30 and 2^-30
    assert added == ([3, 3] if guarded else [7])
    one_after_the_other(monkeypatch)
    assert same(sliced, kernel.multiply(a, b, None))

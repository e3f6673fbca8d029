"""The NumPy twins of the tensor-core kernels: they say, without a GPU, what accuracy to expect and why."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm_kernels.config import FLOAT8
from distmm_kernels.emulation.formats import GRANULE, Guard
from distmm_kernels.tiles.hopper_tiles import STRETCH
from tests.kernels.reference import accuracy, twins
from tests.tables import later, number_of

ROUNDOFF = 2.0**-24
HELD = (
    "normal",
    "uniform",
    "skew along k",
    "cancellation",
    "half zeros",
    "integers",
    "large",
    "small",
)  # by fp16 parts
FINITE = [name for name in accuracy.SETS if name != "not finite"]
BY_TF32 = [name for name in FINITE if name not in ("large", "small", "tiny", "subnormal")]


def drawn(name, m=24, k=1024, n=20, seed=0):
    return accuracy.draw(name, m, k, n, seed)


def guards(split, a, b):
    return split(a)[-1] | split(np.ascontiguousarray(b.T))[-1]


@pytest.mark.parametrize("name", FINITE)
def test_where_no_guard_is_raised_the_error_is_below_that_of_a_float32_chain(name):
    a, b = drawn(name)
    chain = accuracy.errors(twins.fma_chain(a, b), a, b)
    by_fp16, by_tf32 = guards(twins.split_fp16, a, b), guards(twins.split_tf32, a, b)
    assert by_fp16 in (0, Guard.SPARSE) if name in HELD else by_fp16 & ~Guard.SPARSE
    assert (by_tf32 == 0) == (name in BY_TF32)
    few = 1.5 if name == "very wide exponents" else 1.0  # so few products make each sum that a chain hardly rounds
    for kernel, holds in (("fp16x3", name in HELD), ("tf32x3", by_tf32 == 0)):
        if holds:
            ours = accuracy.errors(getattr(twins, kernel)(a, b), a, b)
            assert ours.normwise <= few * chain.normwise
            assert ours.componentwise <= chain.componentwise


@pytest.mark.parametrize(("kept", "step"), [(25, 16), (24, 8)])  # H200, A100
@pytest.mark.parametrize("k", later([256, 1024]))
@pytest.mark.parametrize("name", FINITE)
def test_sums_that_leave_after_each_instruction_have_errors_below_those_of_a_float32_chain(name, k, kept, step):
    a, b = drawn(name, k=k)
    chain = accuracy.errors(twins.fma_chain(a, b), a, b)
    few, most = (2.0, 1.01) if name == "very wide exponents" else (1.0, 1.0)  # of few products a chain hardly rounds
    for halves, holds, part in (("float16", HELD, step), ("float32", BY_TF32, step // 2)):
        if name in holds:
            ours = accuracy.errors(twins.mma_sync_x3(a, b, halves=halves, kept=kept, step=part), a, b)
            assert ours.normwise <= few * chain.normwise
            assert ours.componentwise <= most * chain.componentwise


def test_integers_are_exact():
    a, b = drawn("integers")
    for kernel in (twins.fp16x3, twins.tf32x3, twins.fma_chain):
        assert (kernel(a, b) == a.astype(np.float64) @ b).all()


@pytest.mark.parametrize("name", ["normal", "uniform"])
def test_without_promotion_truncation_makes_both_worse_than_float32(name):
    a, b = drawn(name, m=12, k=4096, n=12)
    chain = accuracy.errors(twins.fma_chain(a, b), a, b)
    for kernel in (twins.fp16x3, twins.tf32x3):
        promoted = accuracy.errors(kernel(a, b), a, b)
        truncated = accuracy.errors(kernel(a, b, promotion=None), a, b)
        assert truncated.normwise > 4 * chain.normwise > 12 * promoted.normwise


def test_one_tf32_product_has_the_error_of_11_bits():
    a, b = drawn("normal")
    assert 1e-4 < accuracy.errors(twins.one_product(a, b), a, b).normwise < 4e-4


@pytest.mark.parametrize("dtype", later(["float16", ml_dtypes.bfloat16, "float32"]))
def test_the_error_of_one_product_does_not_grow_with_k_on_positive_numbers(dtype):
    """The bound that `distmm_kernels.tiles.hopper_tiles.STRETCH` states; without promotion the error is linear in k."""
    bound = {"float16": 3.2e-4, "bfloat16": 3.2e-4, "float32": 4.0e-4}[np.dtype(dtype).name]
    k, rng = 6 * STRETCH + 100, np.random.default_rng(0)
    a, b = (rng.random(shape, np.float32) for shape in ((2, k), (k, 3)))
    a, b = (twins.nearest_tf32(x) if dtype == "float32" else x.astype(dtype) for x in (a, b))
    exact = a.astype("f8") @ b.astype("f8")

    def error(promotion):
        return np.abs(twins.one_product(a, b, promotion=promotion) / exact - 1).max()

    assert error(STRETCH) <= 6.5e-5 < bound
    assert error(None) > 4 * error(STRETCH)


@pytest.mark.parametrize(("distribution", "normwise"), [("random", 6e-4), ("standard_normal", 2e-4)])
def test_the_error_of_8_bit_floats_is_that_of_one_stage(distribution, normwise):
    """Without promotion the tensor cores' sums keep 13 bits: 13 % error on positive numbers at k = 8192."""
    rng, k = np.random.default_rng(0), 4096
    a, b = (getattr(rng, distribution)(shape).astype(FLOAT8[0]) for shape in ((3, k), (k, 4)))
    exact = a.astype("f8") @ b.astype("f8")

    def error(c):
        return np.linalg.norm(c - exact) / np.linalg.norm(exact)

    assert error(twins.float8(a, b)) < normwise
    assert error(twins.one_product(a, b, promotion=None)) > 6 * error(twins.float8(a, b))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_cuts_of_one_product_at_the_stretch_leave_the_bits(dtype):
    rng, k = np.random.default_rng(1), 2 * STRETCH + 300
    a, b, c = (rng.standard_normal(shape).astype("f4") for shape in ((2, k), (k, 3), (2, 3)))
    a, b, d = a.astype(dtype), b.astype(dtype), c
    for first, last in itertools.pairwise((0, STRETCH, 2 * STRETCH, k)):
        d = twins.one_product(a[:, first:last], b[first:last], d)
    assert (d == twins.one_product(a, b, c)).all()


def test_below_256_of_k_a_chain_may_be_better():
    a, b = drawn("uniform", m=48, k=1, n=48)
    chain = accuracy.errors(twins.fma_chain(a, b), a, b)
    assert accuracy.errors(twins.fp16x3(a, b), a, b).normwise > chain.normwise
    a, b = drawn("uniform", m=48, k=256, n=48)
    chain = accuracy.errors(twins.fma_chain(a, b), a, b)
    assert accuracy.errors(twins.fp16x3(a, b), a, b).normwise < chain.normwise


def test_steep_skew_along_k_destroys_fp16_parts_and_their_guard_says_so():
    a, b = drawn("steep skew along k")
    assert accuracy.errors(twins.fp16x3(a, b), a, b).normwise > 1e-5
    assert Guard.RANGE in guards(twins.split_fp16, a, b)


@pytest.mark.parametrize("kernel", ["fp16x3", "tf32x3"])
def test_cuts_of_k_at_the_granule_leave_the_bits(kernel):
    a, b = drawn("normal", m=3, k=GRANULE + 320, n=4)
    c = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    multiply = getattr(twins, kernel)
    cut = multiply(a[:, GRANULE:], b[GRANULE:], multiply(a[:, :GRANULE], b[:GRANULE], c))
    assert (cut == multiply(a, b, c)).all()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
@settings(max_examples=number_of(200))
def test_tf32_parts_add_up_to_the_number(numbers):
    x = np.array([numbers], np.float32)
    hi, lo, guard = twins.split_tf32(x)
    assert not (hi.view(np.uint32) & 0x1FFF).any()
    fits = (np.abs(x) > 2.0**-100) & (np.abs(x) < 2.0**127)
    error = np.abs(hi[fits].astype(np.float64) + lo[fits] - x[fits])
    assert (error <= np.abs(x[fits]) * 2.0**-22).all()
    assert (Guard.OVERFLOW in guard) == bool((np.abs(x) >= 2.0**56).any())


@given(st.integers(-149, -51), st.integers(0, 8191), st.sampled_from([1, -1]))
@settings(max_examples=number_of(100))
def test_one_number_that_tf32_parts_cannot_keep_raises_a_guard(exponent, place, sign):
    x = np.full((2, 8192), 2.0**-50, np.float32)
    x[1, place] = sign * 2.0**exponent
    *_, guard = twins.split_tf32(x)
    assert (Guard.UNDERFLOW in guard) == (exponent < -115)


@given(
    st.lists(st.floats(width=32, min_value=2.0**-17, max_value=1.0), min_size=1, max_size=40),
    st.integers(-60, 60),
    st.randoms(use_true_random=False),
)
@settings(max_examples=number_of(200))
def test_fp16_parts_add_up_to_the_number(numbers, exponent, random):
    signs = np.array([random.choice((-1, 1)) for _ in numbers])
    x = np.ldexp(np.array([numbers], np.float32) * signs, exponent).astype(np.float32)
    hi, lo, scale, guard = twins.split_fp16(x)
    assert np.isfinite(hi).all()
    whole = (hi.astype(np.float64) + lo) * scale[:, None]
    top = np.abs(x).max()
    assert (np.abs(whole - x) <= np.maximum(np.abs(x) * 2.0**-22, top * 2.0**-39)).all()
    if 2.0**-60 <= top < 2.0**61:
        assert not guard & (Guard.OVERFLOW | Guard.UNDERFLOW)


def test_one_instruction_truncates_towards_zero():
    one, least = np.float32(1), np.float32(2.0**-25)
    acc = np.full((1, 1), one)
    a, b = np.array([[1.0, 1.0]], np.float16), np.array([[2.0**-12], [2.0**-13]], np.float16)
    assert twins.wgmma(acc, a * np.float16(2.0**-12), b)[0, 0] == one  # 2^-24 and 2^-25: kept, then cut off
    assert twins.wgmma(-acc, a, b)[0, 0] > -one
    assert twins.wgmma(acc, -a * np.float16(2.0**-13), b)[0, 0] == np.nextafter(one, np.float32(0))
    assert twins.wgmma(np.float32(0) * acc, a * np.float16(2.0**-12), b)[0, 0] == 2.0**-24 + least


def test_terms_below_25_bits_are_lost_before_they_are_added():
    acc = np.ones((1, 1), np.float32)
    a = np.full((1, 16), 2.0**-13, np.float16)
    assert twins.wgmma(acc, a, np.full((16, 1), 2.0**-13, np.float16))[0, 0] == 1  # 16 terms of 2^-26 would be 2^-22
    assert twins.wgmma(acc, a, np.full((16, 1), 2.0**-12, np.float16))[0, 0] == 1 + 2.0**-21


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_to_tf32_is_to_nearest_and_ties_go_to_even(number):
    given = np.float32(number)
    rounded = twins.nearest_tf32(given)
    fraction, exponent = np.frexp(np.float64(given))
    least = max(int(exponent) - 11, -136)  # the last of 11 bits; subnormal numbers have fewer
    expected = np.ldexp(np.rint(np.ldexp(fraction, int(exponent) - least)), least)
    if abs(expected) < 2.0**128:
        assert rounded == expected
    else:
        assert np.isinf(rounded)
    assert np.signbit(rounded) == np.signbit(given)


def test_ties_infinities_and_every_kind_of_nan_are_rounded_to_tf32_as_they_must():
    ties = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11], np.float32)
    assert (twins.nearest_tf32(ties) == [1, 1 + 2.0**-9, -1]).all()
    ends = np.array([np.inf, -np.inf, np.finfo(np.float32).max, 0.0, -0.0], np.float32)
    assert (twins.nearest_tf32(ends) == [np.inf, -np.inf, np.inf, 0, 0]).all()
    # the last of NaN's bits alone, all of them, NumPy's, and negative ones
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001, 0xFFFFFFFF, 0xFF801000], np.uint32)
    kept = twins.nearest_tf32(nans.view(np.float32))
    assert np.isnan(kept).all()
    assert not (kept.view(np.uint32) & 0x1FFF).any(), "tensor cores do not read these"

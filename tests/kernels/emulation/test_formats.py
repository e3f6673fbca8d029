from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.emulation.formats import FP16_PAIR, GRANULE, TF32, TF32_PAIR, granules, tf32_bits, warps_of
from distmm_kernels.emulation.splits import Layout, Parts


@given(st.integers(0, 5 * GRANULE))
def test_granules_cover_k(k):
    assert (granules(k) - 1) * GRANULE < k <= granules(k) * GRANULE or k == granules(k) == 0


@given(st.integers(1, 5 * GRANULE))
def test_the_warps_of_a_row_hold_a_granule_of_it_and_are_no_more_than_needed(k):
    held = min(k, GRANULE)
    warps = warps_of(k)
    assert 8 % warps == 0
    assert warps * 1024 >= held
    assert warps == 1 or warps // 2 * 1024 < held


@given(st.sampled_from([FP16_PAIR, TF32_PAIR, TF32]), st.integers(1, 4), st.integers(1, 300),
       st.integers(1, 3 * GRANULE), st.booleans())  # fmt: skip
def test_pieces_tile_the_memory_of_an_operand(form, batch, rows, k, by_rows):
    at = Layout.of(form, batch, rows, k, by_rows)
    parts = Parts(form, at, type("Memory", (), {"ptr": 1 << 20}))
    itemsize, spans = form.dtype.itemsize, []
    for i in range(granules(k)):
        hi, lo, scales, scales_step = parts.piece(i)
        length = min(GRANULE, k - i * GRANULE)
        assert hi.shape == ((batch, rows, length) if at.k_major else (batch, length, rows))
        assert all(number % 16 == 0 for part in (hi, lo) for number in (part.address, part.pitch, part.step))
        assert hi.columns * itemsize <= hi.pitch
        if at.k_major and form.guarded:
            spans += [(hi.address, hi.address + batch * rows * hi.pitch)]
        last = hi.address + (batch - 1) * hi.step + (hi.rows - 1) * hi.pitch + hi.columns * itemsize
        assert last <= (1 << 20) + (at.lo or at.scales)
        assert lo.address - hi.address == at.lo
        if form.scaled:
            assert (1 << 20) + at.scales <= scales
            assert scales + (batch - 1) * scales_step + 4 * (rows + 256) <= (1 << 20) + at.maxima
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert at.lo <= at.scales <= at.maxima <= at.words <= at.end


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_to_tf32_is_to_nearest_and_ties_go_to_even(number):
    given = np.float32(number)
    rounded = tf32_bits(given.view(np.uint32))
    fraction, exponent = np.frexp(np.float64(given))
    least = max(int(exponent) - 11, -136)  # the last of 11 bits; subnormal numbers have fewer
    expected = np.ldexp(np.rint(np.ldexp(fraction, int(exponent) - least)), least)
    if abs(expected) < 2.0**128:
        assert rounded.view(np.float32) == expected
    else:
        assert np.isinf(rounded.view(np.float32))
    assert np.signbit(rounded.view(np.float32)) == np.signbit(given)


def test_ties_infinities_and_every_kind_of_nan_are_rounded_to_tf32_as_they_must():
    ties = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11], np.float32)
    assert (tf32_bits(ties.view(np.uint32)).view(np.float32) == [1, 1 + 2.0**-9, -1]).all()
    ends = np.array([np.inf, -np.inf, np.finfo(np.float32).max, 0.0, -0.0], np.float32)
    assert (tf32_bits(ends.view(np.uint32)).view(np.float32) == [np.inf, -np.inf, np.inf, 0, 0]).all()
    # the last of NaN's bits alone, all of them, NumPy's, and negative ones
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001, 0xFFFFFFFF, 0xFF801000], np.uint32)
    kept = tf32_bits(nans)
    assert np.isnan(kept.view(np.float32)).all()
    assert not (kept & 0x1FFF).any(), "tensor cores do not read these"


@pytest.mark.compile
@pytest.mark.usefixtures("cuda_compiler")
def test_the_kernels_that_round_to_tf32_do_it_in_no_other_way():
    """``cvt.rna`` rounds ties away from zero, and the accelerator to even: bits would depend on alignment."""
    from numba import cuda

    from distmm_kernels.device_code.copies.prepass import split_rows, split_transposed

    for source in (split_rows(TF32, True, 1), split_transposed(TF32)):
        ptx, _ = cuda.compile(source.function, source.signature, device=False, cc=(8, 0), output="ptx", abi="numba")
        assert "cvt.rna" not in ptx

"""A fixed number of digits is enough for two operands if their sums have enough products of near numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.emulation.formats import GRANULE, NEAR_EXPONENT, SMALL_EXPONENT, TOP
from distmm_kernels.emulation.moduli import LIMIT
from distmm_kernels.emulation.residues import SHORTEST, nearest, smallest
from distmm_kernels.emulation.sparsity import FAR_BITS, SIXTEENTHS, Counts, counts, holds
from distmm_kernels.gemm import emulated


def test_products_of_near_numbers_of_a_sixteenth_of_the_steps_outweigh_what_small_numbers_lose():
    """The worst cases of `distmm_kernels.emulation.sparsity`, for each length."""
    for k in range(emulated.SHORTEST, GRANULE + 1):
        lost = 2.0 ** (SMALL_EXPONENT - 22) * 2.0 ** (TOP + 1) * 15 / 16 * k
        assert (k + 2) * 2.0**-24 * k / 16 * 4.0**NEAR_EXPONENT >= lost
    for k in range(SHORTEST, 2 * GRANULE + 1):  # a granule of complex numbers has twice as many real ones
        lost = 0.5 * math.sqrt(LIMIT) * math.sqrt(2 * 15 / 16 * k) + k / 4
        assert (k + 2) * 2.0**-53 * k / 16 * float(nearest(k)) ** 2 >= lost
        assert smallest(k) < nearest(k)


@pytest.mark.minutes
@given(st.integers(1, 60), st.data())
def test_where_it_holds_each_sum_of_a_row_with_small_numbers_has_a_sixteenth_of_near_products(k, data):
    def drawn():
        rows = st.lists(st.sampled_from(["near", "far", "small", "zero"]), min_size=k, max_size=k)
        return np.array(data.draw(st.lists(rows, min_size=1, max_size=3)))

    def counted(rows):
        words = (rows == "small").sum(axis=1) << FAR_BITS | (rows != "near").sum(axis=1)
        return next(counts(words.astype(np.uint32)[None, None], (k,)))

    a, b = drawn(), drawn()
    if holds(counted(a), counted(b)) and ((a == "small").any() or (b == "small").any()):
        for row in a[(a != "zero").any(axis=1) & (a == "near").any(axis=1)]:
            for column in b[(b != "zero").any(axis=1) & (b == "near").any(axis=1)]:
                assert 16 * ((row == "near") & (column == "near")).sum() >= k


def test_it_holds_for_operands_without_sparse_rows():
    for k in (512, 1000, GRANULE):
        most = Counts(small=9, far=SIXTEENTHS * k // 16, length=k)
        assert holds(most, most)
        assert not holds(most, Counts(0, k - 1, k))
        assert holds(Counts(0, k - 1, k), Counts(0, k - 1, k)), "no number is small"


def test_counts_are_those_of_each_granule_and_rows_of_zeros_have_none():
    words = np.array([[[3 << FAR_BITS | 5, 10], [7, 1 << FAR_BITS | 4]]], np.uint32)
    assert tuple(counts(words, (10, 8))) == (Counts(3, 5, 10), Counts(1, 7, 8))

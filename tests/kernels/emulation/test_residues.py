"""float64 by residues, in NumPy: the numbers of the method, the device's arithmetic on them, and how wrong it is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm_kernels.emulation.formats import GRANULE, Guard
from distmm_kernels.emulation.moduli import (
    LIMIT,
    MODULI,
    OFFSET,
    PRODUCT,
    UNITS,
    WEIGHTS,
    byte_weights,
    digits,
    epilogue_multiplier,
    multiplier,
    start,
)
from distmm_kernels.emulation.residues import SHORTEST, Layout, Residues, nearest, smallest
from distmm_kernels.emulation.sparsity import holds
from distmm_kernels.gemm.guarded import WORKSPACE, parts
from distmm_kernels.gemm.residue_products import strip
from distmm_kernels.gemm.residues import split_steps
from distmm_kernels.layout.vectors import row_pitch
from tests.kernels.reference import accuracy, exact, residue_twin
from tests.tables import later, number_of

# where residues would have a larger error than a chain of multiply-adds, and two sets where they hardly differ
GUARDED = {
    "wide exponents",
    "very wide exponents",
    "skew along k",
    "steep skew along k",
    "outliers",
    "subnormal",
    "not finite",
}


def test_moduli_have_no_common_factors_and_their_residues_are_int8():
    assert all(math.gcd(p, q) == 1 for p, q in itertools.combinations(MODULI, 2))
    assert all(128 < p <= 256 for p in MODULI)
    assert 2**117 < PRODUCT < 2**118
    assert all(-128 <= weight <= 127 for p in MODULI for weight in byte_weights(p))


def test_weights_are_residues_of_one_modulus_alone():
    for j, weight in enumerate(WEIGHTS):
        assert [weight % p for p in MODULI] == [int(i == j) for i in range(len(MODULI))]


def test_sums_of_digits_are_exact_in_float64():
    for number in (*WEIGHTS, PRODUCT):
        assert sum(digit << unit for digit, unit in zip(digits(number), UNITS, strict=True)) == number
    for i in range(len(UNITS)):
        most = sum(128 * abs(digits(weight)[i]) for weight in WEIGHTS)
        quotient = sum(128 * abs(weight) for weight in WEIGHTS) // PRODUCT + 1
        assert most + quotient * abs(digits(PRODUCT)[i]) < 2**53


@given(st.integers(-(2**62), 2**62), st.sampled_from(MODULI))
@settings(max_examples=number_of(300))
def test_the_device_finds_the_residue_from_the_bytes(number, modulus):
    in_bytes = (number + 2**63).to_bytes(8, "little")
    value = start(modulus) + sum(map(math.prod, zip(in_bytes, byte_weights(modulus), strict=True)))
    assert 0 <= value < 2**19
    residue = value - (value * multiplier(modulus) >> 32) * modulus - OFFSET
    assert -128 <= residue <= 127
    assert (residue - number) % modulus == 0


@given(st.integers(-(2**27), 2**27), st.sampled_from(MODULI))
@settings(max_examples=number_of(300))
def test_the_epilogue_finds_the_residue_of_a_sum(total, modulus):
    value = total + (modulus << 20) + OFFSET
    assert 0 <= value < 2**29
    assert epilogue_multiplier(modulus) < 2**32
    quotient = (value * epilogue_multiplier(modulus) >> 32) >> 7
    assert value - quotient * modulus == (total + OFFSET) % modulus


@pytest.mark.parametrize("modulus", MODULI)
def test_quotients_by_multiplication_are_exact_up_to_their_bounds(modulus):
    # where the error of the quotient is largest: one below a multiple, as far up as there is one
    for bound, factor, shift in ((2**19, multiplier(modulus), 32), (2**29, epilogue_multiplier(modulus), 39)):
        for value in (modulus - 1, modulus, bound // modulus * modulus - 1, bound - 1):
            assert value * factor >> shift == value // modulus


@given(st.lists(st.integers(-int(LIMIT), int(LIMIT)), min_size=1, max_size=20), st.sampled_from([0, 43, 84]))
@settings(max_examples=number_of(300))
def test_integers_are_made_of_their_residues_and_rounded_once(numbers, zeros):
    numbers = [x >> zeros << zeros for x in numbers]
    found = residue_twin.reconstruct(np.array([[(x + OFFSET) % p - OFFSET for x in numbers] for p in MODULI]))
    for x, y in zip(numbers, found, strict=True):
        if zeros:  # so are products of what is exact in float64
            assert y == float(x)
        else:
            assert abs(int(y) - x) <= math.ulp(float(x)) / 2 + 2**43


@pytest.mark.parametrize("name", accuracy.SETS)
@pytest.mark.parametrize("k", later([SHORTEST, 2048, GRANULE], first=2))
def test_where_no_guard_is_raised_the_error_is_below_that_of_a_float64_chain(name, k):
    a, b = accuracy.draw(name, 24, k, 20, seed=1, dtype=np.float64)
    d, guard = residue_twin.product(a, b)
    assert (guard & ~Guard.SPARSE != 0) == (name in GUARDED)
    if name not in GUARDED:
        ours = exact.errors(d, a, b)
        chain = exact.errors(residue_twin.fma_chain(a, b), a, b)
        assert ours.normwise <= chain.normwise
        assert ours.componentwise <= chain.componentwise
        assert ours.componentwise < 2.0**-52


@pytest.mark.parametrize("k", [SHORTEST, GRANULE])
def test_ordinary_matrices_raise_no_guard_in_any_of_many_rows(k):
    rng = np.random.default_rng(0)
    for x in (rng.standard_normal((500, k)), rng.random((500, k)), rng.exponential(size=(500, k))):
        assert residue_twin.scaled(x)[2] == 0


def test_integers_are_exact_and_their_zeros_are_zero():
    a, b = accuracy.draw("integers", 30, 1200, 40, dtype=np.float64)
    b[600:] = -b[:600]
    a[:15, 600:] = a[:15, :600]  # their products cancel
    d, guard = residue_twin.product(a, b)
    assert guard == 0
    assert (d == a @ b).all()
    assert (d[:15] == 0).all()


def test_numbers_that_are_just_not_small_keep_the_bound_of_a_chain():
    for k in range(SHORTEST, 2 * GRANULE + 1):  # both factors are rounded by 1/2, and the sum is rounded twice
        assert 1 / smallest(k) + 2.0**-52 <= (k + 2) * 2.0**-53
    x = np.full((2, SHORTEST), smallest(SHORTEST) + 0.49609375)
    x[0, 0], x[1, 1] = np.sqrt(LIMIT * (1 - 1e-9) - (x[:, 2:] ** 2).sum(axis=1))  # one large number that meets 0
    x[1, 0] = x[0, 1] = 0
    a, b = x[:1], np.ascontiguousarray(x[1:].T)
    d, guard = residue_twin.product(a, b)
    assert guard == Guard.SPARSE
    assert holds(residue_twin.row_counts(a), residue_twin.row_counts(x[1:]))
    assert 0.4 < exact.errors(d, a, b).componentwise / ((SHORTEST + 2) * 2.0**-53) < 0.5


def test_one_row_that_cannot_be_held_raises_the_guard():
    x = np.abs(np.random.default_rng(0).standard_normal((5, 600))) + 0.5
    for value, guard in ((np.inf, Guard.OVERFLOW), (np.nan, Guard.OVERFLOW), (1e200, Guard.OVERFLOW)):
        y = x.copy()
        y[3, 7] = value
        assert guard in residue_twin.scaled(y)[2]
    y = x.copy()
    y[3] *= 1e-130
    assert Guard.UNDERFLOW in residue_twin.scaled(y)[2]
    y[3] = 1e-300
    assert Guard.RANGE in residue_twin.scaled(y)[2]
    y[3] = 0
    assert residue_twin.scaled(y)[2] == Guard.SPARSE
    assert residue_twin.row_counts(y) == (0, residue_twin.row_counts(x).far, 600), "a row of zeros loses nothing"


def test_a_norm_is_scaled_to_its_share_of_the_range():
    x = np.random.default_rng(1).standard_normal((50, 2000)) * 2.0 ** np.arange(-200, 300, 10)[:, None]
    integers, factor, _ = residue_twin.scaled(x)
    norms = (integers.astype(np.float64) ** 2).sum(axis=1)
    assert ((norms <= LIMIT * (1 + 1e-12)) & (norms > LIMIT / 4 * (1 - 1e-12))).all()
    assert (np.abs(integers * factor[:, None] - x) <= factor[:, None] / 2).all()
    assert integers.max() < 2**63


def test_cuts_of_k_at_the_granule_leave_the_bits():
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 2 * GRANULE + 320)), rng.standard_normal((2 * GRANULE + 320, 4)), np.ones((3, 4))
    whole, _ = residue_twin.product(a, b, c)
    for cut in (GRANULE, 2 * GRANULE):
        first, _ = residue_twin.product(a[:, :cut], b[:cut], c)
        assert (residue_twin.product(a[:, cut:], b[cut:], first)[0] == whole).all()


def test_the_order_of_a_rows_squares_does_not_depend_on_what_follows():
    x = np.random.default_rng(0).standard_normal((3, 300))
    padded = np.concatenate([x, np.zeros((3, 700))], axis=1)
    assert (residue_twin.squares(padded) == residue_twin.squares(x)).all()
    assert residue_twin.squares(np.zeros((2, 0))).tolist() == [0, 0]


@given(st.integers(1, 3), st.integers(1, 300), st.integers(1, 3 * GRANULE))
def test_granules_of_all_matrices_lie_side_by_side(batch, rows, k):
    from types import SimpleNamespace

    at = Layout.of(batch, rows, k)
    residues = Residues(at, SimpleNamespace(ptr=1 << 20))
    assert len(MODULI) * batch * rows * k <= at.end
    spans = []
    for index in range(-(-k // GRANULE)):
        for matrix in range(batch):
            stack = residues.granule(index, matrix)
            assert not any(number % 16 for number in (stack.address, stack.pitch, stack.step))
            assert stack.matrices == len(MODULI)
            assert stack.columns == min(GRANULE, k - index * GRANULE) <= stack.pitch
            spans.append((stack.address, stack.address + stack.matrices * stack.step))
            spans.append((residues.factors(index, matrix), residues.factors(index, matrix) + 8 * rows))
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= (1 << 20) + at.end


@given(st.integers(1, 100_000), st.integers(1, 3_000_000))
def test_strips_of_c_bound_the_memory_of_its_residues(m, n):
    rows, columns = strip(m, n)
    assert 1 <= rows <= m
    assert rows == m or rows % 128 == 0
    assert 1 <= columns <= n
    assert columns == n or columns % 256 == 0
    assert len(MODULI) * rows * row_pitch(columns, 1) <= WORKSPACE


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_parts_cover_every_element_of_c_once(m, n, rows, columns):
    seen = np.zeros((m, n), int)
    for down, across in parts(m, n, rows, columns):
        part = seen[down, across]
        assert part.size
        assert part.shape[0] <= rows
        assert part.shape[1] <= columns
        part += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(("k", "steps"), [(0, 0), (1, 0), (1023, 0), (1024, 1024), (8192, 8192), (8192 + 1023, 8192),
                                          (8192 + 1024, 8192 + 1024), (3 * 8192, 3 * 8192)])  # fmt: skip
def test_short_granules_have_no_residues(k, steps):
    assert split_steps(k, SHORTEST) == steps


def test_fewer_steps_ask_for_larger_integers():
    assert [smallest(2**k) for k in (10, 12, 14)] == [2**44, 2**43, 2**42]
    assert all(smallest(k) <= smallest(k - 1) for k in range(SHORTEST, 2 * GRANULE))
    assert [nearest(2**k).bit_length() - 1 for k in range(10, 15)] == [49, 49, 48, 47, 46]

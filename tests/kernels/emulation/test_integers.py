"""int32 and int64 by residues, in NumPy: the numbers of the method, and products that are exact modulo 2^bits."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.emulation.integers import SHIFT, SYSTEMS
from distmm_kernels.emulation.moduli import OFFSET, byte_weights, epilogue_multiplier, multiplier, start, weight
from distmm_kernels.emulation.residues import Layout, Residues
from distmm_kernels.gemm.guarded import WORKSPACE
from distmm_kernels.gemm.residue_products import matrices_of, strip
from distmm_kernels.layout.vectors import row_pitch
from tests.kernels.reference import integer_twin
from tests.tables import number_of

WIDTHS = pytest.mark.parametrize("bits", [32, 64])
MODULI = SYSTEMS[64].moduli


def wrapped(number, bits):
    """The signed integer of so many bits that is the same modulo 2^bits."""
    half = 1 << bits - 1
    return (number + half) % (1 << bits) - half


def largest(bits):
    """The largest magnitude of a granule's product."""
    return GRANULE << 2 * bits - 2


def test_moduli_have_no_common_factors_and_fit_the_epilogue():
    assert SYSTEMS[32].moduli == MODULI[:10]
    assert all(math.gcd(p, q) == 1 for p, q in itertools.combinations(MODULI, 2))
    assert all(128 < p <= 256 and epilogue_multiplier(p) < 2**32 for p in MODULI)
    assert 128 * 128 * GRANULE <= 2**27  # of sums before they are reduced
    for modulus in MODULI:
        for bound, factor, shift in ((2**19, multiplier(modulus), 32), (2**29, epilogue_multiplier(modulus), 39)):
            for value in (modulus - 1, modulus, bound // modulus * modulus - 1, bound - 1):
                assert value * factor >> shift == value // modulus


@WIDTHS
def test_no_product_of_a_granule_is_too_large_for_the_nearest_multiple(bits):
    system = SYSTEMS[bits]
    wrong = sum(128 * abs((share << 40) - (weight(p, system.product) << 40 + SHIFT) // system.product)
                for share, p in zip(system.shares, system.moduli, strict=True)) / 2 ** (40 + SHIFT)  # fmt: skip
    assert wrong < 0.0012
    assert largest(bits) / system.product < 0.37 < 0.5 - wrong
    assert math.prod(system.moduli[:-1]) < 2 * largest(bits), "one modulus fewer would not do"


@WIDTHS
def test_sums_of_shares_stay_in_32_bits_with_a_sign(bits):
    system = SYSTEMS[bits]
    assert sum(128 * abs(share) for share in system.shares) + (1 << SHIFT - 1) < 2**31
    assert all(0 <= each < 1 << bits for each in (*system.weights, system.start))
    assert abs(system.shares_start) < 2**31


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from(MODULI))
@settings(max_examples=number_of(300))
def test_the_device_finds_the_residue_of_any_integer_from_its_bytes(number, modulus):
    in_bytes = (number + 2**63).to_bytes(8, "little")
    value = start(modulus) + sum(map(math.prod, zip(in_bytes, byte_weights(modulus), strict=True)))
    assert 0 <= value < 2**19
    residue = value - (value * multiplier(modulus) >> 32) * modulus - OFFSET
    assert residue == (number + OFFSET) % modulus - OFFSET


@WIDTHS
@given(st.data())
@settings(max_examples=number_of(100))
def test_integers_are_made_of_their_residues_modulo_two_to_the_bits(bits, data):
    most, system = largest(bits), SYSTEMS[bits]
    near = st.sampled_from([most, -most, 0, 1 << bits, -1 << bits - 1])
    numbers = data.draw(st.lists(st.one_of(st.integers(-most, most), near), min_size=1, max_size=20))
    residues = np.array([[(x + OFFSET) % p - OFFSET for x in numbers] for p in system.moduli], np.int8)
    assert integer_twin.reconstruct(residues, bits).tolist() == [wrapped(x, bits) for x in numbers]


def drawn(rng, shape, bits, kind):
    """Integers: all of one size, or the extremes alone."""
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    dtype = f"int{bits}"
    if kind == "any":
        return rng.integers(low, high, shape, dtype, endpoint=True)
    return np.where(rng.random(shape) < {"low": 0, "mixed": 0.5}[kind], np.array(high, dtype), np.array(low, dtype))


@WIDTHS
@pytest.mark.parametrize("kind", ["any", "low", "mixed"])
@pytest.mark.parametrize("k", [1, 100, GRANULE + 3])
def test_products_are_those_of_python_integers_modulo_two_to_the_bits(bits, kind, k):
    rng = np.random.default_rng(k)
    a, b, c = (drawn(rng, shape, bits, kind) for shape in ((4, k), (k, 3), (4, 3)))
    exact = a.astype(object) @ b.astype(object)
    for added in (None, c):
        want = exact if added is None else exact + added.astype(object)
        found = integer_twin.product(a, b, added)
        assert found.dtype == a.dtype
        assert found.tolist() == [[wrapped(int(x), bits) for x in row] for row in want]


@WIDTHS
def test_a_whole_granule_of_the_least_integers_is_exact(bits):
    """The largest product that there is; a cast of uint64 and uint32 to it has the bits of NumPy's own product."""
    a = np.full((2, GRANULE), -(1 << bits - 1), f"int{bits}")
    assert (integer_twin.product(a, a.T) == wrapped(largest(bits), bits)).all()
    rng = np.random.default_rng(1)
    x, y = (rng.integers(0, 1 << bits, shape, f"uint{bits}") for shape in ((5, 700), (700, 6)))
    found = integer_twin.product(x.astype(a.dtype), y.astype(a.dtype))
    np.testing.assert_array_equal(found.astype(x.dtype), x @ y)


@given(st.integers(1, 3), st.integers(1, 300), st.integers(512, 3 * GRANULE), st.sampled_from([32, 64]))
def test_granules_of_all_matrices_lie_side_by_side_and_plans_count_them(batch, rows, k, bits):
    count = len(SYSTEMS[bits].moduli)
    at = Layout.of(batch, rows, k, moduli=count, scaled=False)
    residues = Residues(at, SimpleNamespace(ptr=1 << 20))
    assert count * batch * rows * k <= at.end <= count * batch * rows * (k + 127) + 256
    spans = []
    for index in range(-(-k // GRANULE)):
        for matrix in range(batch):
            stack = residues.granule(index, matrix)
            assert not any(number % 16 for number in (stack.address, stack.pitch, stack.step))
            assert stack.shape == (count, rows, min(GRANULE, k - index * GRANULE))
            spans.append((stack.address, stack.address + count * stack.step))
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= (1 << 20) + at.end


@given(st.integers(1, 100_000), st.integers(1, 3_000_000), st.sampled_from([10, 18]))
def test_strips_of_c_bound_the_memory_of_its_residues(m, n, count):
    rows, columns = strip(m, n, count)
    assert 1 <= rows <= m
    assert 1 <= columns <= n
    assert count * rows * row_pitch(columns, 1) <= WORKSPACE


def test_each_place_of_a_batch_is_the_product_of_its_two_matrices():
    found = list(matrices_of((2, 1), (3,), (2, 3)))
    assert found == [((i, j), i, j) for i in range(2) for j in range(3)]
    assert list(matrices_of((), (), ())) == [((), 0, 0)]
    assert list(matrices_of((0,), (1,), (0,))) == []

"""complex128 by residues of three products: exact where it should be, and next to a chain of multiply-adds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.emulation.formats import GRANULE, Guard
from distmm_kernels.emulation.moduli import LIMIT, MODULI, OFFSET
from distmm_kernels.layout.real_view import as_real
from tests.kernels.reference import accuracy, complex_twin, exact, residue_twin
from tests.kernels.reference.exact import doubled_twin
from tests.kernels.reference.matrices import as_complex
from tests.tables import later


def pair(name, m, k, n, seed=0):
    """Complex matrices whose parts are of one of the sets of `accuracy`."""
    drawn = [accuracy.draw(name, m, k, n, seed + i, dtype="float64") for i in (0, 1)]
    return tuple(as_complex(np.stack(parts, axis=-1).reshape(len(parts[0]), -1)) for parts in zip(*drawn, strict=True))


@pytest.mark.parametrize("modulus", MODULI)
def test_remainders_of_what_two_and_three_residues_make_are_exact(modulus):
    device = pytest.importorskip("distmm_kernels.device_code.reconstruct_complex")
    multiplier = device.remainder_multiplier(modulus)
    for value in range(1 << 10):
        assert (value * multiplier) >> device.SHIFT == value // modulus
    assert (1 << 10) * multiplier < 1 << 32
    # bytes are OFFSET more than residues: the least and the greatest of what is divided
    residues = (-OFFSET, OFFSET - 1)
    for first, second, third in itertools.product(residues, repeat=3):
        real, imaginary = first - second + OFFSET + modulus, third - first - second + OFFSET + 2 * modulus
        assert 0 <= real < 1 << 10
        assert 0 <= imaginary < 1 << 10
        assert (real % modulus - OFFSET - (first - second)) % modulus == 0
        assert (imaginary % modulus - OFFSET - (third - first - second)) % modulus == 0


def test_sums_of_both_parts_of_a_scaled_number_are_integers_of_64_bits():
    assert math.sqrt(2 * LIMIT) + 2 < 2**63


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 6), st.integers(0, 100))
def test_integers_come_out_exact(m, k, n, seed):
    rng = np.random.default_rng(seed)
    a, b, c = (rng.integers(-99, 100, s) + 1j * rng.integers(-99, 100, s) for s in ((m, k), (k, n), (m, n)))
    product, _ = complex_twin.product(a, b, c)
    np.testing.assert_array_equal(product, a @ b + c)


@pytest.mark.parametrize("set_name", later(accuracy.SETS))
@pytest.mark.parametrize("k", [512, 2000])
def test_where_no_guard_is_raised_the_error_is_below_that_of_a_float64_chain(set_name, k):
    a, b = pair(set_name, 10, k, 8)
    with np.errstate(invalid="ignore", over="ignore"):
        product, guard = complex_twin.product(a, b)
    if guard & ~Guard.SPARSE:
        assert set_name not in ("normal", "uniform", "cancellation", "half zeros", "integers", "large", "small")
        return
    left, right = as_real(a), doubled_twin(b)
    chain = exact.errors(as_real(as_complex(residue_twin.fma_chain(left, right))), left, right)
    ours = exact.complex_errors(product, a, b)
    assert ours.normwise <= chain.normwise
    assert ours.componentwise <= chain.componentwise


def test_three_products_give_the_bits_of_four():
    a, b = pair("integers", 5, 900, 4)
    a, b = a * 2.0**-60, b * 2.0**40
    three, _ = complex_twin.product(a, b)
    four, _ = residue_twin.product(as_real(a), doubled_twin(b))
    np.testing.assert_array_equal(as_real(three), four)


def test_cuts_of_k_at_the_granule_leave_the_bits():
    a, b = pair("normal", 3, GRANULE + 700, 4)
    whole, _ = complex_twin.product(a, b)
    first, _ = complex_twin.product(a[:, :GRANULE], b[:GRANULE])
    np.testing.assert_array_equal(complex_twin.product(a[:, GRANULE:], b[GRANULE:], first)[0], whole)

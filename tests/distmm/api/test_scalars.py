"""The type of a product follows its operands: Python's scalars are weak, as in NumPy 2 (NEP 50)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import distmm
from distmm.api.scalars import common_type

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        (2.5, BFLOAT16),
        (3, BFLOAT16),
        (1, BFLOAT16),
        (2.5j, "complex64"),
        (np.float32(2.5), "float32"),
        (np.float64(2.5), "float64"),
    ],
)
def test_bfloat16_takes_scalars_as_numpy_takes_them_with_float16(scalar: Any, expected: Any) -> None:
    assert common_type({"A": BFLOAT16, "B": BFLOAT16}, alpha=scalar, beta=0) == expected
    if not isinstance(scalar, np.number):
        like = common_type({"A": np.dtype("f2"), "B": np.dtype("f2")}, alpha=scalar, beta=0)
        assert (like == "float16") == (expected == BFLOAT16)


def test_a_weak_scalar_does_not_widen_what_a_strong_one_has_widened() -> None:
    types = {"A": BFLOAT16, "B": BFLOAT16}
    assert common_type(types, alpha=2.5, beta=np.float32(3)) == np.float32
    assert common_type({**types, "C": np.dtype("f4")}, alpha=2.5, beta=3.5) == np.float32


def test_a_product_of_bfloat16_and_a_python_float_stays_bfloat16() -> None:
    a = np.random.default_rng(1).integers(-4, 5, (8, 6)).astype(BFLOAT16)
    b = np.random.default_rng(2).integers(-4, 5, (6, 7)).astype(BFLOAT16)
    C = distmm.gemm(2.5, a, b)
    assert C.dtype == BFLOAT16
    expected = (2.5 * (a.astype("f4") @ b.astype("f4"))).astype(BFLOAT16)  # exact in float32, and rounded once
    np.testing.assert_array_equal(C.compute(scheduler="synchronous"), expected)

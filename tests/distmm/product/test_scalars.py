"""The type of a product follows its operands: Python's scalars are weak, as in NumPy 2 (NEP 50)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import distmm
from distmm.errors import InputError
from distmm.product.scalars import common_type

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


def test_numpys_scalars_are_accepted_like_pythons() -> None:
    a = np.arange(9.0).reshape(3, 3)
    for alpha in (np.float32(2), np.int64(2), np.complex64(2 - 1j), np.float16(0.5)):
        c = distmm.gemm(alpha, a, a, blocks=(np.int64(2), 3, np.int16(2))).compute(scheduler="synchronous")  # type: ignore[arg-type]
        np.testing.assert_allclose(c, alpha * (a @ a))
        assert distmm.verify(a, a, c, alpha=alpha, seed=np.int64(1))  # type: ignore[arg-type]
        assert distmm.verify(a, a, c, alpha=alpha, check="full")  # type: ignore[arg-type]
    labels = [np.int64(0), np.int64(1)]
    np.testing.assert_array_equal(distmm.einsum(a, labels, a, [1, np.int8(2)], [0, np.int8(2)]).compute(), a @ a)
    assert distmm.empty(np.int64(3)).shape == (3,)  # type: ignore[arg-type]
    assert distmm.empty(np.array([3, 4])).shape == (3, 4)  # type: ignore[arg-type]
    assert distmm.cpus(np.int64(2), memory=np.int64(10**9)).memory == 10**9  # type: ignore[arg-type]
    assert distmm.topk(a, a, np.int64(1)).values.compute(scheduler="synchronous").shape == (3, 1)
    with pytest.raises(InputError, match="seed is -1"):
        distmm.verify(a, a, a, seed=-1)

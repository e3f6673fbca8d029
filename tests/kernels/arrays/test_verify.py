"""`verify` accepts right products of every type, and finds single wrong elements."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels import matmul, verify

TYPES = ["float32", "float64", "float16", "bfloat16", "complex64", "complex128", "int8", "uint8", "int32", "int64"]


def numbers(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = 5 * rng.standard_normal(shape)
    dtype = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    return (x + 1j * rng.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_right_product_passes_and_a_wrong_element_is_found(dtype):
    a, b = numbers((3, 50, 70), dtype), numbers((70, 60), dtype, 1)
    c = matmul(a, b)
    check = verify(a, b, c)
    assert check
    assert check.residual <= 1
    assert "c is a @ b" in check.message
    c[1, 7, 9] += np.asarray(90).astype(c.dtype)
    wrong = verify(a, b, c)
    assert not wrong
    assert "row 7 of c is wrong: element (1, 7, 9)" in wrong.message


def test_an_error_far_below_the_bound_of_its_row_stands_out():
    a, b = numbers((300, 400), "float32"), numbers((400, 200), "float32", 1)
    c = matmul(a, b)
    c[40, 3] += 0.5  # the bound of the row is above 1
    assert "element (40, 3)" in verify(a, b, c).message


def test_roundings_of_one_direction_are_right():
    tenths = np.full((40, 8192), 0.1, np.float32)
    c = np.zeros((40, 40), np.float32)
    for k in range(8192):  # a chain: errors grow with k
        c += tenths[:, k : k + 1] * tenths[:, k]
    assert verify(tenths, tenths.T, c)


def test_factors_and_wider_results_are_allowed():
    a = numbers((20, 30), "int8")
    assert verify(a, a.T, -3 * (a.astype("int32") @ a.T.astype("int32")), alpha=-3)
    x = numbers((20, 30), "bfloat16")
    assert verify(x, x.T, x.astype("float32") @ x.T.astype("float32"))
    assert not verify(x, x.T, 1.01 * (x.astype("float32") @ x.T.astype("float32")))


def test_sizes_near_the_limits_of_the_type_do_not_matter():
    a, b = numbers((20, 30), "float32"), numbers((30, 10), "float32", 1)
    for scale in (1e-18, 1e17):
        c = (a * np.float32(scale)) @ (b * np.float32(scale))
        assert verify(a * np.float32(scale), b * np.float32(scale), c)
        c[2, 3] *= 2
        assert not verify(a * np.float32(scale), b * np.float32(scale), c)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_numbers_whose_squares_the_type_does_not_hold_are_compared(dtype, scale):
    a, b = numbers((20, 30), dtype) * scale, numbers((30, 10), dtype, 1)
    for left, right in ((a, b), (b.T, a.T)):
        c = left @ right
        assert verify(left, right, c)
        c[2, 3] *= 2
        assert not verify(left, right, c)


def test_what_cannot_be_tested_is_not_right():
    nan = np.full((3, 3), np.nan)
    assert not verify(nan, nan, nan)
    assert "cannot be tested" in verify(nan, nan, nan).message
    large = np.full((3, 4), 1e3, np.float16)  # float16 ends at 65504
    message = verify(large, large.T, np.full((3, 3), np.inf, np.float16)).message
    assert message == "row 0 cannot be tested: element (0, 0) of a @ b is 4000000.0, c is float16"
    with pytest.raises(TypeError, match="c is of bool"):
        verify(np.ones((2, 2), bool), np.ones((2, 2), bool), np.ones((2, 2), bool))
    with pytest.raises(ValueError, match=r"c has shape \(3, 2\)"):
        verify(np.ones((3, 3)), np.ones((3, 3)), np.ones((3, 2)))
    with pytest.raises(TypeError, match="c is a builtins"):
        verify(np.ones((3, 3)), np.ones((3, 3)), [1])


def test_an_empty_product_is_right():
    assert verify(np.ones((0, 3)), np.ones((3, 2)), np.ones((0, 2)))
    assert verify(np.ones((2, 0)), np.ones((0, 2)), np.zeros((2, 2)))

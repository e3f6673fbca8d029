"""What every kernel does alike: checks of the operands, and `finish`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels import device
from distmm_kernels.config import Problem
from distmm_kernels.kernel import product_shape
from distmm_kernels.select import select
from distmm_kernels.symmetric import DIAGONAL_TILE


def kernel_for(dtype):
    return select(Problem(2, 2, 2, np.dtype(dtype)), device.cpu())


def test_shapes_that_do_not_go_together_are_refused_with_their_values():
    kernel = kernel_for("float32")
    a, b = np.zeros((3, 4), np.float32), np.zeros((5, 6), np.float32)
    with pytest.raises(ValueError, match=r"\(3, 4\) @ \(5, 6\): a has 4 columns and b has 5 rows"):
        kernel.multiply(a, b, None)
    with pytest.raises(ValueError, match=r"batch sizes \(2,\) and \(3,\) do not broadcast"):
        product_shape((2, 3, 4), (3, 4, 6))
    with pytest.raises(ValueError, match=r"c has shape \(6,\), but a @ b has \(3, 6\)"):
        kernel.multiply(a, np.zeros((4, 6), np.float32), np.zeros(6, np.float32))
    with pytest.raises(ValueError, match=r"A has shape \(4,\); a block has two dimensions"):
        kernel.prepare_a(np.zeros(4, np.float32))


def test_operands_that_would_change_kind_are_refused():
    with pytest.raises(TypeError, match=r"A is complex64, the kernel computes in float32: convert it with \.astype"):
        kernel_for("float32").prepare_a(np.zeros((2, 2), np.complex64))
    with pytest.raises(TypeError, match="B is float64, the kernel computes in int32"):
        kernel_for("int32").prepare_b(np.zeros((2, 2)))
    with pytest.raises(TypeError, match="c is float64, this kernel accumulates in float32: convert it first"):
        kernel_for("float32").multiply(np.zeros((2, 2), "f"), np.zeros((2, 2), "f"), np.zeros((2, 2)))


def test_without_steps_of_k_the_product_is_c():
    kernel = kernel_for("float64")
    a, b, c = np.zeros((2, 0)), np.zeros((0, 3)), np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(kernel.multiply(a, b, None), np.zeros((2, 3)))
    d = kernel.multiply(a, b, c)
    np.testing.assert_array_equal(d, c)
    assert not np.shares_memory(d, c)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "int8", "uint8", "bool"])
def test_narrow_operands_accumulate_wide_and_are_rounded_once(dtype):
    dtype = np.dtype(dtype)
    kernel = kernel_for(dtype)
    a, b = np.full((2, 300), 3).astype(dtype), np.full((300, 2), 5).astype(dtype)
    half = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)
    assert half.dtype == kernel.accumulator
    whole = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), half, dtype=dtype)
    assert whole.dtype == dtype
    np.testing.assert_array_equal(whole, np.full((2, 2), 9000, kernel.accumulator).astype(dtype))


def test_complex_operands_are_refused_where_bfloat16_would_drop_their_imaginary_part():
    with pytest.raises(TypeError, match="A is complex64"):
        kernel_for(ml_dtypes.bfloat16).prepare_a(np.ones((2, 2), np.complex64))


def test_finish_hands_back_what_needs_no_change():
    kernel = kernel_for("float32")
    d = np.ones((2, 3), np.float32)
    assert kernel.finish(d, 1, 0, None, "float32") is d


def test_finish_does_not_read_c0_when_beta_is_zero():
    kernel = kernel_for("float32")
    d = np.ones((2, 3), np.float32)
    out = kernel.finish(d, 2.5, 0, np.full((2, 3), np.nan, np.float32), "float32")
    np.testing.assert_array_equal(out, np.full((2, 3), 2.5, np.float32))
    np.testing.assert_array_equal(d, np.ones((2, 3)))


def test_finish_scales_adds_and_casts_without_touching_its_inputs():
    kernel = kernel_for("float32")
    d, c0 = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 4, np.float16)
    out = kernel.finish(d, -2, 0.5, c0, "float16")
    assert out.dtype == np.float16
    np.testing.assert_array_equal(out, (-2 * d + 2).astype(np.float16))
    np.testing.assert_array_equal(d, np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(c0, np.full((2, 3), 4))
    np.testing.assert_array_equal(kernel.finish(d, 1, 1, np.float32([1, 2, 3]), "float32"), np.add(d, [1, 2, 3]))


def test_finish_of_complex_products_takes_complex_factors():
    d = np.array([[1 + 1j]], np.complex64)
    assert kernel_for("complex64").finish(d, 2j, 1j, d, "complex64") == np.complex64((1 + 1j) * 3j)
    with pytest.raises(ValueError, match="alpha is 2j, but the product is float32: give a real number"):
        kernel_for("float32").finish(np.ones((1, 1), "f"), 2j, 0, None, "float32")


def test_finish_of_a_bool_product_asks_for_non_zero():
    kernel = kernel_for("int64")
    d, c0 = np.array([[0, 3, 0]]), np.array([[True, False, False]])
    np.testing.assert_array_equal(kernel.finish(d, 1, 0, None, bool), [[False, True, False]])
    np.testing.assert_array_equal(kernel.finish(d, 1, 1, c0, bool), [[True, True, False]])


def test_integer_factors_must_be_exact():
    kernel = kernel_for("int32")
    d = np.array([[7]], np.int32)
    for alpha in (0.5, 2**31, -(2**31) - 1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"alpha is .*, but the product is int32: give an integer in its range"):
            kernel.finish(d, alpha, 0, None, "int32")
    with pytest.raises(ValueError, match=r"beta is 1\.5"):
        kernel.finish(d, 1, 1.5, d, "int32")
    assert kernel.finish(d, -2.0, 0, None, "int32") == -14


def test_unsigned_factors_wrap_as_the_result_does():
    kernel = kernel_for("int32")
    d = np.array([[5]], np.int32)
    out = kernel.finish(d, 2**32 - 1, 2**31, np.array([[1]], np.uint32), "uint32")
    assert out == np.uint32(5 * (2**32 - 1) + 2**31 & 0xFFFFFFFF)


def test_beta_without_c0_is_refused():
    with pytest.raises(ValueError, match=r"beta is 2.*c0 is needed"):
        kernel_for("float32").finish(np.ones((1, 1), "f"), 1, 2, None, "float32")


@pytest.mark.parametrize(
    ("dtype", "alpha", "beta", "to"),
    [("float32", 0.3, 0.7, "float16"), ("float64", -2, 0, "float64"), ("int32", 3, -1, "int8"), ("bool", 1, 1, "bool")],
)
@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("n", [0, 4])
def test_multiply_finishes_as_finish_does(dtype, alpha, beta, to, k, n):
    kernel, rng = kernel_for(dtype), np.random.default_rng(0)
    a, b = (kernel.prepare_a(rng.integers(0, 3, shape).astype(dtype)) for shape in ((3, k), (k, n)))
    c, c0 = rng.integers(0, 9, (3, n)).astype(kernel.accumulator), rng.integers(0, 2, n).astype(to)
    added = c0 if beta else None
    fused = kernel.multiply(a, b, c, alpha=alpha, beta=beta, c0=added, dtype=to)
    finished = kernel.finish(kernel.multiply(a, b, c), alpha, beta, added, to)
    assert fused.dtype == to
    np.testing.assert_array_equal(fused, finished)


def test_multiply_refuses_factors_as_finish_does_before_any_work(monkeypatch):
    kernel = kernel_for("int32")
    a = np.ones((2, 2), "i4")
    monkeypatch.setattr(type(kernel), "_accumulate", lambda *_: pytest.fail("the product was begun"))
    with pytest.raises(ValueError, match="give an integer"):
        kernel.multiply(a, a, None, alpha=1.5)
    with pytest.raises(ValueError, match="c0 is needed"):
        kernel.multiply(a, a, None, beta=2)


def test_panels_that_a_kernel_cannot_join_are_multiplied_one_after_the_other():
    kernel, rng = kernel_for("float64"), np.random.default_rng(0)
    panels = [(rng.random((2, k)), rng.random((k, 3))) for k in (4, 4, 1)]
    assert all(
        x is y
        for pair, same in zip(kernel.joined(panels), panels, strict=True)
        for x, y in zip(pair, same, strict=True)
    )


@pytest.mark.parametrize("symmetry", ["symmetric", "hermitian"])
@pytest.mark.parametrize(("dtype", "to"), [("float32", "float16"), ("complex64", "complex64"), ("int8", "int32")])
@pytest.mark.parametrize("m", [0, 5, DIAGONAL_TILE + 3])
def test_a_symmetric_product_has_the_full_products_lower_half_twice(symmetry, dtype, to, m):
    kernel, rng = kernel_for(dtype), np.random.default_rng(0)
    block = rng.integers(-9, 9, (2, m, 7)).astype(dtype)
    if block.dtype.kind == "c":
        block += 1j * rng.integers(-9, 9, block.shape)
    a, b = kernel.prepare_both(block, symmetry)
    c, c0 = (rng.integers(0, 9, (2, m, m)).astype(kind) for kind in (kernel.accumulator, to))
    last = {"alpha": 2, "beta": 3, "c0": c0, "dtype": to}
    full = np.asarray(kernel.multiply(a, b, c, **last))
    d = kernel.multiply(a, b, c, **last, symmetry=symmetry)
    below = np.tril(full, -1)
    diagonal = np.eye(m) * (full.real if symmetry == "hermitian" else full)
    above = below.swapaxes(-1, -2)
    np.testing.assert_array_equal(d, below + diagonal + (above.conj() if symmetry == "hermitian" else above))
    sums = kernel.multiply(a, b, c)
    np.testing.assert_array_equal(kernel.finish(sums, 2, 3, c0, to, symmetry), d)
    before = sums.copy()
    kernel.finish(sums, 1, 0, None, kernel.accumulator, symmetry)
    np.testing.assert_array_equal(sums, before)


def test_what_is_no_symmetric_product_is_refused_by_multiply():
    kernel = kernel_for("complex64")
    a = np.ones((2, 3), "c8")
    with pytest.raises(ValueError, match="alpha is 2j, and a Hermitian product needs a real alpha"):
        kernel.multiply(a, a.T, None, alpha=2j, symmetry="hermitian")
    with pytest.raises(ValueError, match="a @ b is 2 x 4: with symmetry='symmetric', b must be a's transpose"):
        kernel.multiply(a, np.ones((3, 4), "c8"), None, symmetry="symmetric")

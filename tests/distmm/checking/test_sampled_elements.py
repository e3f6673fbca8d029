"""Sampled elements of a block: rounding that is not that of the precision is found, and right products pass."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm import verify
from distmm.checking import sampled_elements, sampled_errors
from distmm.planning.precision import Precision
from tests.distmm.checking import nasty
from tests.distmm.checking.sketched import judged
from tests.kernels.reference import twins
from tests.tables import later

EDGE = 20


def operands(k: int, draw: str = "normal", name: str = "float32") -> nasty.Pair:
    a, b = nasty.DATA[draw](np.random.default_rng(k), EDGE, k, EDGE)
    if name == "complex64":
        a, b = a + 1j * a[::-1], b - 1j * b[:, ::-1]
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return a.astype(dtype), b.astype(dtype)


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    if x.dtype.kind == "c":
        return (rounded(x.real, name) + 1j * rounded(x.imag, name)).astype(x.dtype)
    if name == "TF32":
        return twins.nearest_tf32(np.ascontiguousarray(x))
    return x.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name).astype(x.dtype)


@pytest.mark.parametrize("number", later(range(12), first=6))
def test_right_products_of_nasty_data_are_never_wrong(number: int) -> None:
    for each in range(number, 500, 48):
        product = nasty.product(each)
        scalars = {"alpha": product.alpha, "beta": product.beta, "added": product.added}
        found = judged(product.a, product.b, product.c, each, **scalars)
        assert found.residual <= 1, product.name
        assert found.ok or found.settled or not np.isfinite(product.c).all(), product.name


@pytest.mark.parametrize(("name", "k"), later([("float32", 4096), ("float32", 65536), ("complex64", 4096)]))
@pytest.mark.parametrize("narrower", ["TF32", "bfloat16", "float16"])
def test_operands_of_fewer_digits_are_found(narrower: str, k: int, name: str) -> None:
    a, b = operands(k, name=name)
    found = judged(a, b, rounded(a, narrower) @ rounded(b, narrower))
    assert (found.ok, found.settled) == (False, True)
    assert found.residual > 5
    assert judged(a, b, a @ b).residual < 0.3


STEPS = [
    *(("float32", draw, 4096) for draw in ("normal", "uniform", "graded rows", "graded columns", "cauchy")),
    ("float32", "normal", 65536), ("float32", "uniform", 65536), ("bfloat16", "normal", 4096),
    ("bfloat16", "graded rows", 4096),
]  # fmt: skip


@pytest.mark.parametrize(("name", "draw", "k"), STEPS)
def test_a_step_that_is_left_out_is_found(name: str, draw: str, k: int) -> None:
    a, b = (x.astype(np.float32) for x in operands(k, draw, name))
    step = int(np.argsort(np.linalg.norm(a[:, :100], axis=0) * np.linalg.norm(b[:100], axis=1))[50])
    without = np.delete(a, step, 1) @ np.delete(b, step, 0)
    a, b = operands(k, draw, name)
    assert judged(a, b, a.astype(np.float32) @ b.astype(np.float32)).residual < 0.3
    assert judged(a, b, without).residual > 1


@pytest.mark.parametrize("k", [4096, 65536])
def test_a_block_of_another_scale_is_found(k: int) -> None:
    a, b = operands(k)
    assert judged(a, b, (a @ b) * np.float32(1.001)).residual > 5


def test_operands_may_have_the_digits_of_the_precision_that_was_asked_for() -> None:
    a, b = operands(512)
    made = {name: rounded(a, name) @ rounded(b, name) for name in ("TF32", "bfloat16")}
    allowed: list[tuple[Precision, str]] = [("high", "TF32"), ("medium", "TF32"), ("medium", "bfloat16")]
    assert all(judged(a, b, made[name], precision=precision).ok for precision, name in allowed)
    assert all(judged(a, b, one, precision="highest").residual > 1 for one in made.values())


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("kernel", ["chain", "2 lanes", "blas"])
def test_sums_of_equal_numbers_may_all_round_the_same_way(kernel: str, name: str) -> None:
    a, b = operands(16384, "constant rows", name)
    found = judged(a, b, nasty.KERNELS[kernel](a, b))
    assert found.ok
    assert found.residual < 0.5  # 5 for the chain if roundings were taken for independent ones


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128", "float16", "bfloat16"])
def test_a_gpu_has_the_same_samples(name: str) -> None:
    import cupy

    a, b = operands(300, name=name)
    a[0] = a[0] * np.finfo(np.float32).smallest_subnormal  # zeros in 16 bits
    here, there = (
        sampled_elements.sampled(None, put(a), [sampled_elements.columns_of(put(b.T).T, 3, 1)], 5)  # type: ignore[list-item]
        for put in (np.asarray, cupy.asarray)
    )
    assert here is not None
    assert there is not None
    np.testing.assert_array_equal(there.rows, here.rows)
    np.testing.assert_array_equal(there.columns, here.columns)
    for one, other in zip(there.parts, here.parts, strict=True):
        for name in other:
            np.testing.assert_array_equal(one[name], other[name])


def test_elements_are_compared_with_what_was_added_to_them() -> None:
    a, b = operands(4096)
    added = operands(EDGE)[0]
    more = {"alpha": 0.5, "beta": 3.0, "added": added}
    right = np.float32(0.5) * (a @ b) + np.float32(3) * added
    assert judged(a, b, right, **more).ok
    wrong = np.float32(0.5) * (rounded(a, "TF32") @ rounded(b, "TF32")) + np.float32(3) * added
    assert judged(a, b, wrong, **more).residual > 1


def test_cuts_along_k_change_the_level_little() -> None:
    a, b = operands(4096)
    whole, cut = (judged(a, b, rounded(a, "TF32") @ b, panels=panels).residual for panels in (1, 7))
    assert cut == pytest.approx(whole, rel=0.2)


def test_the_threshold_is_that_of_the_sum_of_squares_of_gaussian_numbers() -> None:
    assert [round(sampled_errors.threshold(count), 1) for count in (1, 8, 64)] == [6.8, 2.9, 1.6]
    squares = np.random.default_rng(0).standard_normal((100_000, 64)) ** 2
    assert squares.mean(axis=1).max() < sampled_errors.threshold(64) ** 2


@pytest.mark.parametrize("narrower", ["TF32", "bfloat16"])
def test_verify_finds_operands_of_fewer_digits(narrower: str) -> None:
    a, b = operands(16384)
    assert verify(a, b, a @ b).ok
    wrong = rounded(a, narrower) @ rounded(b, narrower)
    verdict = verify(a, b, wrong)
    assert verdict.outcome == "wrong"
    assert "times what rounding causes" in verdict.message or narrower == "bfloat16"  # that is too much for a row
    assert verify(a, b, wrong, precision="medium").ok


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_verify_takes_no_chain_for_wrong_whose_additions_all_round_the_same_way(name: str) -> None:
    a, b = operands(16384, "constant rows", name)
    c = nasty.KERNELS["chain"](a, b)
    assert verify(a, b, c).outcome == "right"
    c[3, 5] *= 1.01
    verdict = verify(a, b, c)
    assert verdict.outcome == "wrong"
    assert "[3, 5]" in verdict.message


def test_verify_cannot_tell_whether_three_real_products_overflow() -> None:
    a, b = (np.full(shape, 0.9e18 * (1 + 1j), "c8") for shape in ((20, 200), (200, 15)))
    with np.errstate(over="ignore", invalid="ignore"):
        c = nasty.OF_COMPLEX["three real products"](a, b)
    assert not np.isfinite(c).all()
    assert np.isfinite(a.astype("c16") @ b.astype("c16")).all()
    assert verify(a, b, c).outcome == "cannot tell"

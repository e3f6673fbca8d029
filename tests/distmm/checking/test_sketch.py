"""The test of one block by sketches: correct blocks pass and errors are found, whatever the size of the elements."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm.checking import sketch
from distmm.checking.scaling import widened
from distmm.worker import gpu_copies
from distmm_kernels.tolerance import Tolerance
from tests.distmm.checking.sketched import K, M, N, element, judged, matrices
from tests.kernels.reference import twins

TYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int8", "int32", "uint64"]


@pytest.mark.parametrize("draw", ["normal", "uniform"])
@pytest.mark.parametrize("name", TYPES)
def test_right_blocks_pass(name: str, draw: str) -> None:
    found = judged(*matrices(name, draw))
    assert (found.ok, found.settled) == (True, True)
    assert found.residual < 0.3


def bits(c: np.ndarray) -> int:
    return 8 * c.dtype.itemsize // (2 if c.dtype.kind == "c" else 1)


@pytest.mark.parametrize("name", TYPES)
def test_a_flipped_bit_in_a_product_is_found(name: str) -> None:
    """Flip the sign, the exponent and the leading digits of floats, and every bit of integers."""
    a, b, c = matrices(name)
    width = bits(c)
    digits = {"float16": 10, "bfloat16": 7, "float32": 23, "complex64": 23, "float64": 52, "complex128": 52}.get(name)
    last = 0 if digits is None else max(0, digits - (2 if digits <= 10 else 6))
    for bit in range(last, width):
        wrong = c.copy()
        integers = wrong.view(f"u{width // 8}")
        integers[17, 30] ^= integers.dtype.type(1) << integers.dtype.type(bit)
        assert not judged(a, b, wrong).ok, bit


@pytest.mark.parametrize("name", ["int8", "uint16", "int32", "int64"])
def test_a_flipped_bit_in_an_integer_operand_is_found_in_every_position(name: str) -> None:
    """All errors of C may be multiples of a high power of two, which one vector misses every other time."""
    a, b, c = matrices(name)
    width = bits(c)
    for bit in (*range(0, width, 8), *range(width - 4, width)):
        for seed in range(10):
            i, k = np.random.default_rng([seed, bit]).integers(a.shape)
            spoilt = a.copy()
            words = spoilt.view(f"u{width // 8}")
            words[i, k] ^= words.dtype.type(1) << words.dtype.type(bit)
            wrong = spoilt @ b
            assert (wrong != c).any()
            assert not judged(a, b, wrong, seed=seed).ok, (bit, seed)


@pytest.mark.parametrize(
    ("name", "lowest"), [("float16", 9), ("bfloat16", 7), ("float32", 17), ("float64", 46), ("complex64", 17)]
)
def test_a_flipped_bit_in_a_float_operand_is_found_from_the_fraction_on(name: str, lowest: int) -> None:
    """As when a block changes between its sketch and the product; lower bits are within the bound of rounding."""
    a, b, _ = matrices(name)
    width, wide = bits(a), np.float32 if a.dtype.itemsize <= 2 else a.dtype
    for bit in range(lowest, width):
        spoilt = a.copy()
        at = np.unravel_index(np.argmax(abs(a.astype(wide))), a.shape)
        words = spoilt.view(f"u{width // 8}").reshape(*a.shape, -1)
        words[(*at, 0)] ^= words.dtype.type(1) << words.dtype.type(bit)
        with np.errstate(all="ignore"):
            wrong = (spoilt.astype(wide) @ b.astype(wide)).astype(a.dtype)
        found = judged(a, b, wrong)
        assert (found.ok, found.row) == (False, at[0]), bit


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("name", TYPES)
def test_a_gpu_judges_its_blocks_as_numpy_does(name: str, beta: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(gpu_copies, "STAGE", 2000)  # bytes, so that the added C is uploaded in several pieces
    monkeypatch.setattr(gpu_copies, "_idle", [])
    a, b, c = matrices(name)
    more = {"beta": beta, "added": matrices(name, "uniform")[2]} if beta else {}
    if beta:
        c = (c + beta * more["added"]).astype(c.dtype)
    here, there = judged(a, b, c, **more), judged(a, b, cupy.asarray(c), **more)
    assert (there.ok, there.settled) == (here.ok, here.settled)
    assert there.residual == pytest.approx(here.residual, abs=0.01)  # the GPU sums rows in another order
    c[17, 30] = c[17, 30] ^ 1 if c.dtype.kind in "iu" else 1000
    found = judged(a, b, cupy.asarray(c), **more)
    assert (found.ok, found.row) == (False, 17)


def test_inf_and_nan_leave_nothing_to_compare() -> None:
    a, b, c = matrices("float32")
    a[3, 5] = np.inf
    found = judged(a, b, a @ b)
    assert (found.ok, found.settled) == (False, False)
    c = a @ b
    c[20, 20] += 100
    assert judged(a, b, c).settled  # the other rows can still be compared


@pytest.mark.parametrize("name", ["float16", "float32", "complex128"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_inf_and_nan_that_no_sum_can_have_are_wrong(name: str, value: float) -> None:
    a, b, c = matrices(name)
    c[20, 20] = value
    found = judged(a, b, c)
    assert (found.ok, found.settled, found.row) == (False, True, 20)
    assert found.residual == np.inf


def test_float16_overflow_leaves_nothing_to_compare() -> None:
    a, b, _ = matrices("float16", "uniform")
    with np.errstate(over="ignore"):
        c = (3000 * (a.astype("f4") @ b.astype("f4"))).astype("f2")
    found = judged((100 * a), (30 * b), c)
    assert (found.ok, found.settled) == (False, False)


@pytest.mark.parametrize(("name", "power"), [("float32", 30), ("complex64", 30), ("float64", 60), ("float64", 500)])
def test_a_small_column_of_c_counts_by_its_own_size(name: str, power: int) -> None:
    a, b, _ = matrices(name)
    b *= (10.0 ** np.linspace(-power / 2, power / 2, N)).astype(b.real.dtype)
    c = a @ b
    found = judged(a, b, c)
    assert (found.ok, found.settled) == (True, True)
    assert found.residual < 0.3
    for zeroed in (slice(0, N // 2), slice(3, 4)):
        wrong = c.copy()
        wrong[:, zeroed] = 0
        assert not judged(a, b, wrong).ok
    c[17, 70] *= 2
    assert judged(a, b, c).row == 17


@pytest.mark.parametrize("scale", [1e-40, 0.0, 1e30])
def test_columns_of_another_size_in_the_first_panel_hide_no_error(scale: float) -> None:
    a, b, _ = matrices("float64")
    b[:100, ::2] *= scale  # the weights of these columns do not fit the other panels
    c = a @ b
    found = judged(a, b, c)
    assert (found.ok, found.settled) == (True, True)
    for column in (20, 21):
        wrong = c.copy()
        wrong[17, column] += 0.5 * abs(c).max()
        assert (judged(a, b, wrong).ok, judged(a, b, wrong).row) == (False, 17)


SCALES = [
    ("float32", 1e-40, 1.0), ("float32", 1e-20, 1e-21), ("float32", 1e-40, 1e30), ("complex64", 1e-41, 1.0),
    ("float64", 1e-310, 1.0), ("float64", 1e-310, 1e300), ("float64", 1e-160, 1e-155), ("complex128", 1e-310, 1.0),
    ("float64", 1e200, 1e106), ("float64", 1e306, 1.0), ("float64", 1.0, 1e306), ("float64", 1e306, 1e-200),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float32", "complex64"])
def test_subnormal_numbers_are_read_where_casts_take_them_for_zero(name: str) -> None:
    import cupy

    a = matrices(name)[0]
    a[::2] *= a.dtype.type(1e-40)
    a[5] = [0, np.inf, np.nan] * (K // 3)
    wide = widened(cupy.asarray(a)).get()
    np.testing.assert_array_equal(wide, a.astype("c16" if name == "complex64" else "f8"), strict=True)
    assert widened(a) is a
    assert (wide[0] != 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "left", "right"), SCALES)
def test_a_gpu_judges_extreme_sizes_as_numpy_does(name: str, left: float, right: float) -> None:
    import cupy

    rng, dtype = np.random.default_rng(2), element(name)
    a, b = ((rng.standard_normal(shape) * scale).astype(dtype) for shape, scale in (((M, K), left), ((K, N), right)))
    tolerance, x, found = Tolerance.of(dtype, dtype, dtype, K), sketch.vectors(0, 0, N, False), []
    for put in (np.asarray, cupy.asarray):
        by = sketch.weigh(put(b), tolerance.work)
        right_side = [sketch.of_b(put(b), 0, 0, tolerance.work, by)]
        sketches = sketch.of_a(None, put(a), right_side, tolerance.work)
        found.append(sketch.judge(tolerance, sketches, 0, put(a @ b), x, by=by))
    assert [(j.ok, j.settled) for j in found] == [(True, True)] * 2


@pytest.mark.parametrize(("name", "left", "right"), SCALES)
def test_right_blocks_near_underflow_and_overflow_pass(name: str, left: float, right: float) -> None:
    rng, dtype = np.random.default_rng(2), element(name)
    a, b = ((rng.standard_normal(shape) * scale).astype(dtype) for shape, scale in (((M, K), left), ((K, N), right)))
    c = a @ b
    found = judged(a, b, c)
    assert (found.ok, found.settled) == (True, True)
    assert found.residual < 0.3
    for alpha in (0.5, 1e-20):
        assert judged(a, b, (alpha * c).astype(dtype), alpha=alpha).ok
    c[17, 30] += 1e-2 * abs(c).max() if abs(c).max() > 1e-30 else 1
    assert judged(a, b, c).row == 17


def test_rows_of_a_are_summed_whatever_their_sizes_are() -> None:
    a, b, _ = matrices("float64")
    a *= 10.0 ** np.linspace(-280, 280, M)[:, None]
    a[:, 200:] *= 1e20  # larger than the panels before
    a[5], a[6, :250] = 0, 0
    c = a @ b
    found = judged(a, b, c)
    assert (found.ok, found.settled) == (True, True)
    for row in (0, 5, 6, 30, M - 1):
        wrong = c.copy()
        wrong[row, 9] += abs(c[row]).max() or 1e-300
        assert judged(a, b, wrong).row == row


@pytest.mark.parametrize("name", ["float32", "int32", "complex64"])
def test_alpha_and_beta_are_part_of_the_test(name: str) -> None:
    a, b, c = matrices(name)
    added = matrices(name, "uniform")[2]
    right = 3 * c - 2 * added
    assert judged(a, b, right, alpha=3, beta=-2, added=added).ok
    assert not judged(a, b, right, alpha=3, beta=-1, added=added).ok


def test_operands_may_be_rounded_where_the_precision_says_so() -> None:
    a, b, _ = matrices("float32")
    c = a.astype(ml_dtypes.bfloat16).astype("f4") @ b.astype(ml_dtypes.bfloat16).astype("f4")
    x = sketch.vectors(0, 0, N, False)
    for precision, right in [("highest", False), ("medium", True)]:
        tolerance = Tolerance.of(a.dtype, b.dtype, c.dtype, K, precision)
        left = sketch.of_a(None, a, [sketch.of_b(b, 0, 0, tolerance.work, None)], tolerance.work)
        assert (sketch.judge(tolerance, left, 0, c, x).residual <= 1) is right


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sums_of_16_bit_products_may_be_cut_off_as_tensor_cores_do(name: str) -> None:
    k, rng, dtype = 8192, np.random.default_rng(0), element(name)
    a, b = rng.random((20, k)).astype(dtype), rng.random((k, 40)).astype(dtype)  # of one sign: what is cut off adds up
    c = twins.one_product(a, b)
    tolerance = Tolerance.of(dtype, dtype, c.dtype, k)
    left = sketch.of_a(None, a, [sketch.of_b(b, 0, 0, tolerance.work, None)], tolerance.work)
    x = sketch.vectors(0, 0, 40, False)
    assert sketch.judge(tolerance, left, 0, c, x).residual < 0.5
    c[3, 5] *= 1.01
    assert sketch.judge(tolerance, left, 0, c, x).residual > 1


@pytest.mark.parametrize("width", [30, 3000])
@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_a_wide_block_that_is_added_to_a_large_c_is_right(dtype: str, width: int) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((40, 300)).astype(dtype), rng.standard_normal((300, width)).astype(dtype)
    before = (1e6 * rng.random((40, width))).astype(dtype)
    tolerance = Tolerance.of(*3 * [np.dtype(dtype)], 300)
    by = sketch.weigh(b, tolerance.work)
    left = sketch.of_a(None, a, [sketch.of_b(b, 0, 0, tolerance.work, by)], tolerance.work)
    x = sketch.vectors(0, 0, width, False)
    found = sketch.judge(tolerance, left, 0, a @ b + before, x, beta=1, added=before, by=by)
    assert found.ok
    assert found.residual < 0.3  # 0.7 to 1.2 if the bound left out the rounding errors of the check's own sums


def test_vectors_have_mean_square_1_and_no_heavier_tails_than_normal_numbers() -> None:
    """The bound of a row, `SIGMAS` standard deviations, relies on it."""
    x = sketch.vectors(1, 0, 100_000, False)
    assert abs(x).min() > 0.65
    moments = [np.mean(x**power) for power in (2, 4, 6, 8)]
    assert moments[0] == pytest.approx(1, rel=0.01)
    assert (np.array(moments[1:]) < [3, 15, 105]).all()

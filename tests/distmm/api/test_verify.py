from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

from distmm import InputError, WrongResultError, verify
from distmm.errors import UndecidedError
from tests.tables import later

pytestmark = pytest.mark.usefixtures("synchronous")


def normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape)


def uniform(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.random(shape)


def wide(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape)


def product(
    dtype: str, draw: object = normal, m: int = 120, k: int = 200, n: int = 90, scale: float = 1
) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    a, b = (draw(rng, s) * scale for s in ((m, k), (k, n)))
    if dtype in "FD":
        a, b = a + 1j * a[::-1], b - 1j * b[::-1]
    a, b = (
        a.astype("i8").astype(dtype) if dtype in "bBiIlL" else a.astype(dtype),
        b.astype("i8").astype(dtype) if dtype in "bBiIlL" else b.astype(dtype),
    )
    c = (a.astype("f4") @ b.astype("f4")).astype("f2") if dtype == "e" else a @ b
    return a, b, c


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("check", "outcome"), [("freivalds", "cannot tell"), ("full", "right")])
@pytest.mark.parametrize("alpha", [1e300, 10**300], ids=["float", "int"])
def test_a_factor_whose_square_no_float_holds_is_checked(alpha: float, check: str, outcome: str) -> None:
    a, b, c = product("f")
    assert verify(a, b, c * np.float32(alpha), alpha=alpha, check=check).outcome == outcome
    assert verify(a, b, c, alpha=alpha, check=check).outcome == "wrong"


@pytest.mark.parametrize("check", ["freivalds", "full"])
@pytest.mark.parametrize("chunks", [None, 50])
def test_a_and_b_do_not_count_with_a_factor_of_zero(chunks: int | None, check: str) -> None:
    a, b, c = product("d")
    a[3, 4] = np.nan
    left = a if chunks is None else da.from_array(a, chunks)
    assert verify(left, b, np.zeros_like(c), alpha=0, check=check).outcome == "right"
    assert verify(left, b, c, alpha=0, check=check).outcome == "wrong"


@pytest.mark.parametrize("check", ["freivalds", "full"])
@pytest.mark.parametrize("draw", later([wide, normal, uniform]))
@pytest.mark.parametrize("dtype", list("fdFD"))
def test_right_products_pass(dtype: str, draw: object, check: str) -> None:
    verdict = verify(*product(dtype, draw), check=check)
    assert verdict.ok, verdict.message
    assert verdict.residual < 0.2
    verdict.raise_if_wrong()


@pytest.mark.parametrize("check", ["freivalds", "full"])
@pytest.mark.parametrize("dtype", list("bBiIlLfdFDe"))
def test_one_wrong_element_is_found_and_named(dtype: str, check: str) -> None:
    a, b, c = product(dtype, scale=0.1 if dtype == "e" else 100)
    C = da.from_array(c, chunks=50)
    assert verify(a, b, C, check=check).ok
    c = c.copy()
    c[77, 60] = c[77, 60] + c.dtype.type(1) if dtype in "bBiIlL" else c[77, 60] + c.dtype.type(np.abs(c).max() / 4)
    verdict = verify(a, b, da.from_array(c, chunks=50), check=check)
    assert not verdict.ok
    assert f"[77, 60]{':' if check == 'full' else ''} C has {c[77, 60]}" in verdict.message
    if check == "freivalds":
        assert "first bad block C[1, 1]" in verdict.message
    with pytest.raises(WrongResultError, match="is not A @ B"):
        verdict.raise_if_wrong()


def test_a_wrong_power_of_two_in_an_integer_product_is_found() -> None:
    a, b, c = product("i", scale=10)
    c = c.copy()
    c[3, 4] ^= np.int32(-(2**31))  # the sign bit: zero modulo 2**31, so a test with signs alone could miss it
    assert not verify(a, b, c).ok


def test_an_error_far_below_the_bound_is_found_because_its_row_stands_out() -> None:
    a, b, c = product("f", m=600, k=900, n=700)
    assert verify(a, b, c).ok
    c[300, 400] += 0.1  # 1/300 of the standard deviation of C
    verdict = verify(a, b, c)
    assert verdict.residual < 1
    assert "[300, 400]" in verdict.message


def test_every_seed_finds_a_missing_block() -> None:
    a, b, c = product("f")
    c = c.copy()
    c[50:100, :50] = 0
    assert not any(verify(a, b, c, seed=seed).ok for seed in range(10))


def test_inf_and_nan_in_the_inputs_are_expected_in_c() -> None:
    a, b, _ = product("d")
    a[5, 5], b[3, 7], b[4, 9] = np.inf, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        c = a @ b
    for check in ("freivalds", "full"):
        assert verify(a, b, c, check=check).ok
    for at, value, message in [
        ((50, 60), 0.0, "at \\[50, 60\\]"),
        ((5, 5), 1.0, "at \\[5, 5\\]"),
        ((60, 7), 1.0, "at \\[60, 7\\] C has 1.0, but column 7 of B"),
    ]:
        broken = c.copy()
        broken[at] = value
        with pytest.raises(WrongResultError, match=message):
            verify(a, b, broken).raise_if_wrong()
        assert not verify(a, b, broken, check="full").ok


def test_a_float16_overflow_is_right_as_infinity() -> None:
    a, b = np.full((20, 100), 100, "f2"), np.ones((100, 30), "f2")
    b[:, 3] = 100
    with np.errstate(over="ignore"):
        c = (a.astype("f4") @ b.astype("f4")).astype("f2")
    assert np.isinf(c[:, 3]).all()
    assert verify(a, b, c, check="full").ok


def spread_out(dtype: str, power: int) -> tuple[np.ndarray, ...]:
    """A, B whose columns are up to ``10**power`` times others, and C."""
    rng = np.random.default_rng(3)
    sizes = (10.0 ** np.linspace(-power / 2, power / 2, 90)).astype(dtype)
    a, b = rng.standard_normal((120, 200)).astype(dtype), rng.standard_normal((200, 90)).astype(dtype) * sizes
    return a, b, a @ b


@pytest.mark.parametrize(("dtype", "power"), later([("f", 30), ("F", 30), ("d", 60), ("D", 60), ("d", 500)]))
def test_a_small_column_of_c_counts_by_its_own_size(dtype: str, power: int) -> None:
    a, b, c = spread_out(dtype, power)
    for seed in range(3):
        assert verify(a, b, da.from_array(c, chunks=50), seed=seed).ok
        for zeroed in (slice(0, 45), slice(3, 4)):
            wrong = c.copy()
            wrong[:, zeroed] = 0
            verdict = verify(a, b, da.from_array(wrong, chunks=50), seed=seed)
            assert verdict.outcome == "wrong"
            assert f", {zeroed.start}] C has {wrong[0, zeroed.start]}" in verdict.message
    c[:, 80] *= 1.5
    assert not verify(a, b, c)


def test_an_element_that_is_far_too_large_is_found() -> None:
    a, b, c = product("d")
    c[3, 4] = 1e200  # its square is infinite
    assert "[3, 4] C has 1e+200" in verify(a, b, c).message


@pytest.mark.parametrize("check", later(["freivalds", "full"]))
@pytest.mark.parametrize(
    ("dtype", "left", "right"),
    [
        ("f", 1e-40, 1.0), ("f", 1e-40, 1e-3), ("f", 1e-20, 1e-21), ("f", 1e-40, 1e30), ("F", 1e-41, 1.0),
        ("d", 1e-310, 1.0), ("d", 1e-310, 1e300), ("d", 1e-160, 1e-155), ("d", 1e-200, 1e-200), ("D", 1e-310, 1.0),
        ("e", 1e-6, 0.1),
    ],
)  # fmt: skip
def test_right_products_of_subnormal_numbers_pass(dtype: str, left: float, right: float, check: str) -> None:
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(shape) * scale for shape, scale in (((120, 200), left), ((200, 90), right)))
    a, b = a.astype(dtype), b.astype(dtype)
    c = (a.astype("f4") @ b.astype("f4")).astype(dtype) if dtype == "e" else a @ b
    verdict = verify(a, b, c, check=check)
    assert verdict.ok, verdict.message
    flushed = np.where(abs(c) < np.finfo(dtype).tiny, 0, c) if dtype != "e" else c
    assert verify(a, b, flushed, check=check).ok
    c[7, 8] = 1
    assert "[7, 8]" in verify(a, b, c, check=check).message


@pytest.mark.parametrize("check", ["freivalds", "full"])
@pytest.mark.parametrize(
    ("left", "right"), [(1e200, 1e106), (1e306, 1.0), (1.0, 1e306), (1e-10, 1e306), (1e306, 1e-200)]
)
def test_products_near_overflow_are_compared(left: float, right: float, check: str) -> None:
    a, b, _ = product("d")
    a, b = a * left, b * right
    c = a @ b
    assert np.isfinite(c).all()
    assert verify(a, b, c, check=check).ok
    c[50, 60] *= 1.001
    verdict = verify(a, b, c, check=check)
    assert verdict.outcome == "wrong"
    assert "[50, 60]" in verdict.message


@pytest.mark.parametrize("check", ["freivalds", "full"])
def test_it_cannot_tell_whether_a_sum_overflows_on_the_way(check: str) -> None:
    a, b = np.ones((8, 4)), np.ones((4, 6))
    a[2] = [1e308, 1e308, -1e308, -1e308]
    c = np.full((8, 6), 4.0)
    c[2] = 0
    assert verify(a, b, c, check=check).ok
    c[2] = np.inf  # which the sum of the first two terms is
    verdict = verify(a, b, c, check=check)
    assert (verdict.outcome, verdict.ok, bool(verdict)) == ("cannot tell", False, False)
    assert "at [2, 0]" in verdict.message
    assert "scale A or B" in verdict.message
    with pytest.raises(UndecidedError, match="may be A @ B or not"):
        verdict.raise_if_wrong()
    c[3, 3] = np.inf  # where no sum can overflow
    assert verify(a, b, c, check=check).outcome == "wrong"


def test_a_product_beyond_the_range_of_its_type_is_right_as_infinity_of_its_sign() -> None:
    a, b, _ = product("d", uniform)
    a, b = a * 1e200, b * 1e200
    a[5] *= -1
    with np.errstate(over="ignore"):
        c = a @ b
    assert np.isinf(c).all()
    assert verify(a, b, c, check="full").ok
    assert verify(a[:9], b, c[:9]).ok
    c[5, 7] = np.inf
    assert verify(a[:9], b, c[:9]).outcome == "cannot tell"  # its terms have one sign, but float64 does not know that


def test_more_rows_with_infinity_than_can_be_computed_again_leave_it_open() -> None:
    a, b, _ = product("d", uniform)
    with np.errstate(over="ignore"):
        c = (a * 1e200) @ (b * 1e200)
    verdict = verify(a * 1e200, b * 1e200, c)
    assert verdict.outcome == "cannot tell"
    assert "use check='full'" in verdict.message


def test_a_verdict_is_true_only_if_c_is_right() -> None:
    a, b, c = product("f")
    assert verify(a, b, c)
    assert not verify(a, b, c + 1)
    assert not verify(a, b, c + 1, check="full")


def test_transposed_operands_and_empty_products() -> None:
    a, b, c = product("d")
    assert verify(a.T.copy(), b, c, transa=True).ok
    assert verify(a, b.T.copy(), c, transb=True).ok
    assert verify(np.ones((0, 3)), np.ones((3, 4)), np.ones((0, 4))).ok
    assert verify(np.ones((2, 0)), np.ones((0, 4)), np.zeros((2, 4))).ok
    assert not verify(np.ones((2, 0)), np.ones((0, 4)), np.ones((2, 4))).ok
    assert verify(np.ones((20, 3), "f4"), np.ones((3, 0), "f4"), np.ones((20, 0), "f4")).ok


def test_a_check_on_the_cluster_agrees(client: object) -> None:
    a, b, c = (da.from_array(x, chunks=37) for x in product("f"))
    with dask.config.set(scheduler=client.get):
        assert verify(a, b, c).ok
        assert not verify(a, b, c + 1e-1 * (da.arange(90, chunks=37) == 50)).ok


@pytest.mark.parametrize(
    ("shapes", "kwargs", "message"),
    [
        (((3, 4), (4, 5), (3, 6)), {}, r"C has shape \(3, 6\).*\(3, 5\)"),
        (((3, 4), (5, 5), (3, 5)), {}, r"\(4\) must equal"),
        (((2, 3, 4), (4, 5), (2, 3, 5)), {}, "verify takes matrices"),
        (((3, 4), (4, 5), (3, 5)), {"check": "some"}, "not one of freivalds, full"),
        (((3, 4), (4, 5), (3, 5)), {"check": np.array(["full", "none"])}, "not one of freivalds, full"),
        (((3, 4), (4, 5), (3, 5)), {"precision": "best"}, "precision 'best' is not one of highest, high, medium, ieee"),
        (((3, 4), (4, 5), (3, 5)), {"seed": -1}, "seed is -1: give a whole number of 0 or more"),
        (((3, 4), (4, 5), (3, 5)), {"seed": 1.5}, "seed is 1.5: give a whole number"),
        (((3, 4), (4, 5), (3, 5)), {"seed": np.array([1, 2])}, "seed is array"),
        (((20000, 4000), (4000, 5000), (20000, 5000)), {"check": "full"}, "use check freivalds"),
    ],
)
def test_bad_checks_are_refused(shapes: tuple[tuple[int, ...], ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        verify(*(da.zeros(s) for s in shapes), **kwargs)


def with_swapped_columns(n: int) -> tuple[np.ndarray, ...]:
    """A, B, the product, and the product with swapped columns: those that 16 vectors of +-1 cannot tell apart."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((40, 30), "f4"), rng.standard_normal((30, n), "f4")
    signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), (n, 16))
    columns: dict[bytes, list[int]] = {}
    for column, of_column in enumerate(signs):
        columns.setdefault(of_column.tobytes(), []).append(column)
    left, right = np.array([same[:2] for same in columns.values() if len(same) > 1]).T
    c = a @ b
    wrong = c.copy()
    wrong[:, left], wrong[:, right] = c[:, right], c[:, left]
    return a, b, c, wrong


@pytest.mark.minutes
@pytest.mark.parametrize("n", [1024, 3000, 66_000])
def test_swapped_columns_are_found_by_every_seed(n: int) -> None:
    a, b, c, wrong = with_swapped_columns(n)
    pair = c.copy()
    pair[:, [7, n - 1]] = c[:, [n - 1, 7]]
    for seed in (None, 0):
        assert verify(a, b, c, seed=seed).ok
        for each in (wrong, pair):
            verdict = verify(a, b, each, seed=seed)
            assert verdict.outcome == "wrong"
            assert "first bad block C[0, " in verdict.message
            row, column = map(int, verdict.message.partition(", at [")[2].partition("]")[0].split(","))
            assert each[row, column] != c[row, column]


def test_a_seed_is_random_unless_it_is_given_and_the_verdict_names_it() -> None:
    a, b, c = product("f")
    first, second = verify(a, b, c), verify(a, b, c)
    assert first.seed != second.seed
    assert f"(seed {first.seed})" in first.message
    again = verify(a, b, c, seed=first.seed)
    assert again == first
    wrong = verify(a, b, c + 1)
    assert f"(seed {wrong.seed})" in wrong.message
    assert verify(a, b, c + 1, seed=wrong.seed) == wrong
    assert verify(a, b, c, check="full").seed is None


def test_dependent_roundings_in_more_rows_than_are_computed_again_are_no_error() -> None:
    """A plain float32 chain of equal numbers rounds in one direction, in each of the rows."""
    a, b = np.full((40, 16_384), 0.1, "f4"), np.ones((16_384, 3), "f4")
    b *= np.float32(1.7)
    c = np.zeros((40, 3), "f4")
    for step in range(a.shape[1]):
        c += a[:, step, None] * b[step]
    for check in ("freivalds", "full"):
        assert verify(a, b, c, check=check).outcome == "right"
    c[5, 2] *= 1.1
    for check in ("freivalds", "full"):
        assert "[5, 2]" in verify(a, b, c, check=check).message


def test_a_single_error_in_a_wide_product_is_found_near_the_tolerance_of_its_element() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((60, 100), "f4"), rng.standard_normal((100, 20_000), "f4")
    c = a @ b
    assert verify(a, b, c).ok
    for seed, column in enumerate((3, 9_999, 19_998)):
        wrong = c.copy()
        wrong[40, column] += 12 * 8 * 10 * 2.0**-24 * (abs(a[40]) @ abs(b[:, column]))  # 12 times the tolerance
        assert f"[40, {column}]" in verify(a, b, wrong, seed=seed).message

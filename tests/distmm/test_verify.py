from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from distmm import InputError, WrongResultError, verify


@pytest.fixture(autouse=True)
def synchronous() -> object:
    with dask.config.set(scheduler="synchronous"):
        yield


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


@pytest.mark.parametrize("check", ["freivalds", "full"])
@pytest.mark.parametrize("draw", [normal, uniform, wide])
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
        ((60, 7), 1.0, "column 7 holds finite"),
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


def test_transposed_operands_and_empty_products() -> None:
    a, b, c = product("d")
    assert verify(a.T.copy(), b, c, transa=True).ok
    assert verify(a, b.T.copy(), c, transb=True).ok
    assert verify(np.ones((0, 3)), np.ones((3, 4)), np.ones((0, 4))).ok
    assert verify(np.ones((2, 0)), np.ones((0, 4)), np.zeros((2, 4))).ok
    assert not verify(np.ones((2, 0)), np.ones((0, 4)), np.ones((2, 4))).ok


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
        (((20000, 4000), (4000, 5000), (20000, 5000)), {"check": "full"}, "use check freivalds"),
    ],
)
def test_bad_checks_are_refused(shapes: tuple[tuple[int, ...], ...], kwargs: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        verify(*(da.zeros(s) for s in shapes), **kwargs)

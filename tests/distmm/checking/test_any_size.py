"""Right products are never called wrong, whatever the size of rows, columns or single elements."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm import verify
from tests.distmm.checking.sketched import element, judged

# Exponents of the smallest subnormal number of each type, and of the largest one.
EXPONENTS = {
    "float16": (-24, 15), "bfloat16": (-133, 127), "float32": (-149, 127), "float64": (-1074, 1023),
    "complex64": (-149, 126), "complex128": (-1074, 1022),
}  # fmt: skip


def draw(rng: np.random.Generator, name: str, shape: tuple[int, int], part: int) -> np.ndarray:
    """Normal numbers, times powers of two of any size: for each row, each column, each element, or one for all.

    Of the exponents of the type a part is used: products of numbers of all sizes mostly overflow.
    """
    sides = [(shape[0], 1), (1, shape[1]), shape, (1, 1)]
    least, most = EXPONENTS[name]
    exponents = rng.integers(least // part, most // part, sides[rng.integers(4)])
    values = rng.standard_normal(shape)
    if name.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    with np.errstate(all="ignore"):
        half = exponents // 2
        scaled = (values * np.exp2(half) * np.exp2(exponents - half)).astype(element(name))
        scaled[~np.isfinite(scaled)] = 1
    return np.asarray(scaled)


@pytest.mark.parametrize("name", EXPONENTS)
def test_a_right_product_is_right_or_cannot_be_told(name: str) -> None:
    outcomes = set()
    wide = np.float32 if ml_dtypes.finfo(element(name)).bits <= 16 else element(name)
    for seed in range(5):
        rng = np.random.default_rng([seed, *map(ord, name)])
        m, k, n = rng.integers(10, 60, 3)
        a, b = (draw(rng, name, shape, 1 + 3 * (seed % 2)) for shape in ((m, k), (k, n)))
        with np.errstate(all="ignore"):
            c = (a.astype(wide) @ b.astype(wide)).astype(element(name))
            verdict = verify(a, b, c, seed=seed)
            found = judged(a, b, c, seed=seed, panels=int(rng.integers(1, 4)))
        assert verdict.outcome != "wrong", (seed, verdict.message)
        assert found.ok or not found.settled, (seed, found)
        outcomes.add(verdict.outcome)
    assert "right" in outcomes

"""Pairs of float32 or float64 matrices that give different kinds of errors, and the measurement of these errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tests.kernels.reference.exact import Errors

__all__ = ["SETS", "draw", "errors"]

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy ships no types


class _Draw:
    """Seeded random numbers, on the host or on the device."""

    def __init__(self, module: Any, seed: int, dtype: np.dtype[Any]) -> None:
        self.module, self.rng, self.dtype = module, module.random.default_rng(seed), dtype

    def normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape, dtype=self.dtype)

    def uniform(self, *shape: int) -> Array:
        return self.rng.random(shape, dtype=self.dtype)

    def integers(self, most: int, *shape: int) -> Array:
        return self.rng.integers(-most, most, shape, endpoint=True).astype(self.dtype)

    def powers(self, most: int, *shape: int) -> Array:
        """Powers of two with exponents from -most to most."""
        exponents = self.rng.integers(-most, most, shape, endpoint=True).astype(np.int32)
        return self.module.ldexp(self.module.ones(shape, self.dtype), exponents)

    def subnormal(self, *shape: int) -> Array:
        # made from bits, since CuPy's arithmetic flushes subnormals to zero
        bits = self.rng.integers(1, 1 << np.finfo(self.dtype).nmant, shape)
        return bits.astype(f"u{self.dtype.itemsize}").view(self.dtype)


Pair = tuple[Array, Array]


def _normal(draw: _Draw, m: int, k: int, n: int) -> Pair:
    return draw.normal(m, k), draw.normal(k, n)


def _uniform(draw: _Draw, m: int, k: int, n: int) -> Pair:
    return draw.uniform(m, k), draw.uniform(k, n)


def _exponents(most: int) -> Callable[..., Pair]:
    def pair(draw: _Draw, m: int, k: int, n: int) -> Pair:
        return draw.normal(m, k) * draw.powers(most, m, k), draw.normal(k, n) * draw.powers(most, k, n)

    return pair


def _skew(most: int) -> Callable[..., Pair]:
    def pair(draw: _Draw, m: int, k: int, n: int) -> Pair:
        skew = draw.powers(most, k)
        return draw.normal(m, k) * skew, draw.normal(k, n) / skew[:, None]

    return pair


def _scaled(exponent: int) -> Callable[..., Pair]:
    def pair(draw: _Draw, m: int, k: int, n: int) -> Pair:
        factor = np.float32(2.0**exponent)
        return draw.normal(m, k) * factor, draw.normal(k, n) * factor

    return pair


def _cancellation(draw: _Draw, m: int, k: int, n: int) -> Pair:
    a, b = draw.normal(m, k), draw.normal(k, n)
    half = k // 2
    a[:, half : 2 * half] = a[:, :half]
    b[half : 2 * half] = -b[:half] * (1 + np.float32(2.0**-10) * draw.normal(half, n))
    return a, b


def _outliers(draw: _Draw, m: int, k: int, n: int) -> Pair:
    a, b = draw.normal(m, k), draw.normal(k, n)
    a[::3, k // 2] *= np.float32(2.0**22)
    b[k // 2] *= np.float32(2.0**-22)
    return a, b


def _zeros(draw: _Draw, m: int, k: int, n: int) -> Pair:
    return draw.module.maximum(draw.normal(m, k), np.float32(0)), draw.module.maximum(draw.normal(k, n), np.float32(1))


def _integers(draw: _Draw, m: int, k: int, n: int) -> Pair:
    return draw.integers(9, m, k), draw.integers(9, k, n)


def _subnormal(draw: _Draw, m: int, k: int, n: int) -> Pair:
    return draw.subnormal(m, k), draw.normal(k, n) * np.float32(2.0**100)


def _not_finite(draw: _Draw, m: int, k: int, n: int) -> Pair:
    a, b = draw.normal(m, k), draw.normal(k, n)
    a[m // 3, k // 2], a[m // 2, k // 3], a[0, 0] = np.nan, np.inf, -np.inf
    b[k // 4, n // 2], b[k - 1, n // 3], b[k // 3, 0] = -np.inf, np.nan, 0
    return a, b


SETS: dict[str, Callable[..., Pair]] = {
    "normal": _normal,
    "uniform": _uniform,  # one sign: errors of truncation add up
    "wide exponents": _exponents(12),
    "very wide exponents": _exponents(40),
    "skew along k": _skew(4),  # small numbers of A are multiplied by large numbers of B
    "steep skew along k": _skew(20),
    "cancellation": _cancellation,
    "outliers": _outliers,
    "half zeros": _zeros,
    "integers": _integers,  # exact in float32: every sum of products is below 2^24 for k up to 200,000
    "large": _scaled(58),
    "small": _scaled(-58),
    "tiny": _scaled(-63),  # products are about the smallest normal numbers
    "subnormal": _subnormal,
    "not finite": _not_finite,
}


def draw(name: str, m: int, k: int, n: int, seed: int = 0, module: Any = np, dtype: DTypeLike = np.float32) -> Pair:
    """Draw a pair ``(m, k)``, ``(k, n)`` of one of the `SETS`.

    Parameters
    ----------
    module
        NumPy draws on the host, CuPy on the device. The two draw different numbers.
    dtype
        float32 or float64. The exponents of the sets were chosen for float32.
    """
    return SETS[name](_Draw(module, seed, np.dtype(dtype)), m, k, n)


def errors(c: Array, a: Array, b: Array) -> Errors:
    """Measure a product of finite float32 matrices against float64, on the host or the device that has the matrices.

    Raises
    ------
    ValueError
        If ``c`` has an element that is not finite, but should be.
    """
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    exact = wide_a @ wide_b
    magnitude = abs(wide_a) @ abs(wide_b)
    error = abs(c - exact)
    if not bool((error < np.inf).all()):
        raise ValueError("the product has elements that are not finite, and the exact one has none")
    return Errors(
        float(_norm(error) / _norm(exact)),
        float((error / np.maximum(magnitude, np.finfo(np.float64).tiny)).max()),
    )


def _norm(x: Array) -> Any:
    return (x * x).sum() ** 0.5

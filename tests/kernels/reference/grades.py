"""Grades of products: the error bound that a product keeps, on matrices that are hard for these bounds.

An implementation may be accurate for all usual matrices, and still have large errors in small elements of C for others.
J. Demmel's *Grading the BLAS* (BLIS Retreat 2024; used by Schwarz et al., arXiv 2511.13778) sorts implementations by
the bound that they keep. The bounds here use ``s = (k + 2) u``, where u is the unit roundoff of the type. For complex
numbers, s is 2 sqrt(2) times as large, as in `matrices.error_bound`. The grades:

- A: ``|C - AB| <= s |A| |B|``, element by element. Every chain of multiply-adds keeps it.
- B: ``|C - AB| <= s |a_i| |b_j|``, where a_i is a row of A, b_j a column of B, and |.| the 2-norm. Products of
  fixed-point numbers, with a scale for each row and column, keep it.
- C: ``|C - AB| <= s |A| |B|`` with Frobenius norms. Strassen's algorithm keeps it.
- F: the bound of C does not hold.

The matrices of `PAIRS` are our own choice. Their numbers are scaled by 2^-span to 2^span.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distmm_kernels.layout.real_view import as_real
from tests.kernels.reference.exact import doubled_twin, exact_product

__all__ = ["PAIRS", "SPANS", "Grade", "grade", "pair"]

Matrix = NDArray[Any]
Pair = tuple[Matrix, Matrix]

# With these spans, no product of two numbers overflows or is subnormal.
SPANS = {"float32": (8, 16, 32, 48), "float64": (8, 16, 32, 64, 128, 256)}

SELECTED = 100  # one of so many columns of A is small. Guards allow at most one small number for each 64.


def _usual(rng: np.random.Generator, m: int, k: int, n: int, span: int) -> Pair:
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


def _opposed(rng: np.random.Generator, m: int, k: int, n: int, span: int) -> Pair:
    """Multiply large numbers of A by small numbers of B. All products have a similar size."""
    a, b = _usual(rng, m, k, n, span)
    exponents = np.linspace(-span, span, k).astype(int)
    return np.ldexp(a, exponents), np.ldexp(b, -exponents[:, None])


def _selected(rng: np.random.Generator, m: int, k: int, n: int, span: int) -> Pair:
    """Make a few columns of A small. Each column of B selects one of them, so all of C is small."""
    a, b = rng.standard_normal((m, k)), np.zeros((k, n))
    small = np.arange(0, k, SELECTED)
    a[:, small] = np.ldexp(a[:, small], -span)
    b[np.resize(small, n), np.arange(n)] = 1
    return a, b


def _hidden(rng: np.random.Generator, m: int, k: int, n: int, span: int) -> Pair:
    """Multiply the largest number of each row of A by zeros of B."""
    a, b = _usual(rng, m, k, n, span)
    a[:, k // 3], b[k // 3] = np.ldexp(a[:, k // 3], span), 0
    return a, b


def _rows_and_columns(rng: np.random.Generator, m: int, k: int, n: int, span: int) -> Pair:
    """Scale each row of A and each column of B differently."""
    a, b = _usual(rng, m, k, n, span)
    rows, columns = (rng.integers(-span // 2, span // 2, size, endpoint=True) for size in (m, n))
    return np.ldexp(a, rows[:, None]), np.ldexp(b, columns)


def _quarters(rng: np.random.Generator, m: int, k: int, n: int, span: int) -> Pair:
    """Make the upper left quarter of A small, the upper right one 0. Strassen's algorithm adds it to the lower half."""
    a, b = _usual(rng, m, k, n, span)
    a[: m // 2, : k // 2], a[: m // 2, k // 2 :] = np.ldexp(a[: m // 2, : k // 2], -span), 0
    return a, b


PAIRS: dict[str, Callable[[np.random.Generator, int, int, int, int], Pair]] = {
    "usual": _usual,
    "opposed along k": _opposed,
    "small columns selected": _selected,
    "largest numbers hidden": _hidden,
    "rows and columns of any size": _rows_and_columns,
    "small quarters": _quarters,
}


def pair(name: str, dtype: DTypeLike, m: int, k: int, n: int, span: int, seed: int = 0) -> Pair:
    """Draw one of the `PAIRS` in float32, float64, complex64 or complex128: ``(m, k)`` and ``(k, n)``.

    Real and imaginary parts are drawn in the same way.
    """
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    a, b = PAIRS[name](rng, m, k, n, span)
    if dtype.kind == "c":
        c, d = PAIRS[name](rng, m, k, n, span)
        a, b = a + 1j * c, b + 1j * d
    return a.astype(dtype), b.astype(dtype)


@dataclass(frozen=True)
class Grade:
    """The grade of a product, and where it exceeds the bounds of better grades.

    Attributes
    ----------
    letter
        The best grade whose bound holds for all pairs and spans.
    lost
        For each better grade: the smallest span at which its bound does not hold, and the pair.
    worst
        The largest error divided by the bound of grade A, and by that of grade B.
    """

    letter: str
    lost: dict[str, tuple[str, int]]
    worst: tuple[float, float]


def grade(
    multiply: Callable[[Matrix, Matrix], Matrix],
    dtype: DTypeLike,
    m: int = 24,
    k: int = 1024,
    n: int = 20,
    seed: int = 0,
) -> Grade:
    """Grade a product of float32, float64, complex64 or complex128 matrices on the host.

    Parameters
    ----------
    multiply
        A function of two NumPy arrays ``(m, k)`` and ``(k, n)`` that returns their product.
    """
    real = np.finfo(np.dtype(dtype)).dtype.name
    worst = {"A": 0.0, "B": 0.0, "C": 0.0}
    lost: dict[str, tuple[str, int]] = {}
    for span in SPANS[real]:
        for name in PAIRS:
            a, b = pair(name, dtype, m, k, n, span, seed)
            for letter, ratio in _over_bounds(multiply(a, b), a, b).items():
                worst[letter] = max(worst[letter], ratio)
                if ratio > 1:
                    lost.setdefault(letter, (name, span))
    letter = next((letter for letter in worst if letter not in lost), "F")
    return Grade(letter, {other: where for other, where in lost.items() if other < letter}, (worst["A"], worst["B"]))


def _over_bounds(c: Matrix, a: Matrix, b: Matrix) -> dict[str, float]:
    """Return, for each grade, the largest error divided by the bound."""
    factor = 2 * np.sqrt(2) if a.dtype.kind == "c" else 1.0
    steps = factor * (a.shape[1] + 2) * float(np.finfo(a.dtype).eps) / 2
    error = _error(c, a, b)
    rows, columns = np.linalg.norm(_wide(a), axis=1), np.linalg.norm(_wide(b), axis=0)
    bounds = {
        "A": np.abs(_wide(a)) @ np.abs(_wide(b)),
        "B": rows[:, None] * columns,
        "C": np.full(error.shape, np.linalg.norm(rows) * np.linalg.norm(columns)),
    }
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            letter: float(np.nan_to_num(error / (steps * bound), nan=0.0, posinf=np.inf).max())
            for letter, bound in bounds.items()
        }


def _error(c: Matrix, a: Matrix, b: Matrix) -> Matrix:
    """Return ``|C - AB|``. AB is computed with twice the digits of float64."""
    if a.dtype.kind != "c":
        high, low = exact_product(a.astype(np.float64), b.astype(np.float64))
        return np.abs((c - high) - low)
    high, low = exact_product(as_real(_wide(a)), doubled_twin(_wide(b)))
    parts = (as_real(_wide(c)) - high) - low
    return np.asarray(np.hypot(parts[:, ::2], parts[:, 1::2]))


def _wide(x: Matrix) -> Matrix:
    return np.ascontiguousarray(x, np.complex128 if x.dtype.kind == "c" else np.float64)

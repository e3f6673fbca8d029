"""The reference product, and the first element in which another product differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Difference", "first_difference", "multiply"]


@dataclass(frozen=True)
class Difference:
    """The first wrong element, in row-major order."""

    index: tuple[int, ...]
    value: Any
    expected: Any

    def __str__(self) -> str:
        where = ", ".join(map(str, self.index))
        return f"C[{where}] is {self.value}, expected {self.expected} (off by {abs(self.value - self.expected):.3g})"


def multiply(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return ``(..., m, k) @ (..., k, n)``, computed in a type with negligible rounding errors.

    Floats are multiplied in float64 and complex numbers in complex128. Integers are exact modulo 2^bits of
    their result type: they wrap around as in NumPy. Bools give bools.
    """
    dtype = np.result_type(a, b)
    if dtype.kind in "fc":
        wide = np.complex128 if dtype.kind == "c" else np.float64
        return np.asarray(np.matmul(a.astype(wide), b.astype(wide)))
    # int64 keeps the low bits of every narrower type
    product = np.matmul(a.astype(np.int64), b.astype(np.int64))
    return np.asarray(product != 0 if dtype.kind == "b" else product.astype(dtype))


def first_difference(
    c: NDArray[Any], expected: NDArray[Any], rtol: float = 0.0, atol: float | NDArray[Any] = 0.0
) -> Difference | None:
    """Find the first element with ``|c - expected| > atol + rtol * |expected|``, in row-major order.

    Parameters
    ----------
    c, expected
        Arrays of the same shape. NaN equals NaN. An infinity equals only the same infinity.
    atol
        A number, or an array of the same shape with a bound for each element
        (`tests.kernels.reference.matrices.error_bound`).

    Returns
    -------
    Difference or None
        None if every element is within the tolerance.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    if c.shape != expected.shape:
        raise ValueError(f"C has shape {c.shape}, the reference {expected.shape}: they must be the same")
    same = (c == expected) | ((c != c) & (expected != expected))
    if c.dtype.kind in "fc" or expected.dtype.kind in "fc":
        wide = np.complex128 if "c" in c.dtype.kind + expected.dtype.kind else np.float64
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(c.astype(wide) - expected.astype(wide))
            same |= distance <= atol + rtol * np.abs(np.where(np.isfinite(expected), expected, 0)).astype(np.float64)
    wrong = np.flatnonzero(~same)
    if wrong.size == 0:
        return None
    index = tuple(int(i) for i in np.unravel_index(wrong[0], c.shape))
    return Difference(index, c[index].item(), expected[index].item())

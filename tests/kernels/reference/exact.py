"""Products with twice the digits of float64, and errors of other products against these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmm_kernels.layout.real_view import REALS, as_real

__all__ = ["Errors", "complex_errors", "doubled_twin", "errors", "exact_product", "two_product", "two_sum"]

Float64 = NDArray[np.float64]
Complex128 = NDArray[np.complex128]


@dataclass(frozen=True)
class Errors:
    """Errors of a product, relative to the product in float64.

    Attributes
    ----------
    normwise
        ``||C - AB|| / ||AB||`` in Frobenius norms.
    componentwise
        The largest element of ``|C - AB| / (|A| |B|)``.
    """

    normwise: float
    componentwise: float


def exact_product(a: Float64, b: Float64) -> tuple[Float64, Float64]:
    """Return ``a @ b`` as the sum of two float64, high and low, with about 100 correct bits. Works on any machine."""
    high, low = np.zeros((2, a.shape[0], b.shape[1]))
    for k in range(a.shape[1]):
        product, rest = two_product(a[:, k, None], b[k])
        total, lost = two_sum(high, product)
        high, low = two_sum(total, low + (lost + rest))
    return high, low


def errors(c: Float64, a: Float64, b: Float64) -> Errors:
    """Measure a product of finite float64 matrices against `exact_product`."""
    high, low = exact_product(a, b)
    error = (c - high) - low
    magnitude = np.maximum(np.abs(a) @ np.abs(b), np.finfo(np.float64).tiny)
    norms = np.linalg.norm(error), np.linalg.norm(high)
    return Errors(float(norms[0] / norms[1]), float((np.abs(error) / magnitude).max()))


def complex_errors(d: Complex128, a: Complex128, b: Complex128) -> Errors:
    """Measure a product of finite complex128 matrices: real and imaginary parts against `exact_product`."""
    return errors(as_real(np.ascontiguousarray(d)), as_real(np.ascontiguousarray(a)), doubled_twin(b))


def doubled_twin(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the real matrix that `distmm_kernels.layout.real_view.doubled` returns for B."""
    *others, k, n = block.shape
    made = np.empty((*others, k, 2, n, 2), REALS[block.dtype.name])
    made[..., 0, :, 0], made[..., 0, :, 1] = block.real, block.imag
    made[..., 1, :, 0], made[..., 1, :, 1] = -block.imag, block.real
    result: np.ndarray[Any, Any] = made.reshape(*others, 2 * k, 2 * n)
    return result


def two_sum(x: Float64, y: Float64) -> tuple[Float64, Float64]:
    """Return the rounded sum and its error (Knuth)."""
    total = x + y
    other = total - x
    return total, (x - (total - other)) + (y - other)


def two_product(x: Float64, y: Float64) -> tuple[Float64, Float64]:
    """Return the rounded product and its error (Dekker)."""
    (x1, x0), (y1, y0) = _halves(x), _halves(y)
    product = x * y
    return product, x0 * y0 - (((product - x1 * y1) - x0 * y1) - x1 * y0)


def _halves(x: Float64) -> tuple[Float64, Float64]:
    far = x * (2.0**27 + 1)
    high = far - (far - x)
    return high, x - high

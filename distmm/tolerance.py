"""How far a right C may be from alpha A @ B + beta C0: error bounds by type, k and precision.

For one element of a sum of k products (Higham & Mary, SIAM J. Sci. Comput. 2019, theorem 3.1)::

    |E_ij| <= lambda sqrt(k) u (|A||B|)_ij

with high probability, u being the unit roundoff of the accumulator. Where the precision allows that operands are
rounded to fewer digits first, each product has a relative error of at most 2 u_in, and the sum one of 2 u_in |A||B|.
For random x of mean square 1 that do not depend on E, ``(E x)_i`` has the standard deviation ``||E_i||_2``, and
``||(|A||B|)_i||_2 <= sum_p |a_ip| ||B_p||_2 <= ||a_i||_2 ||B||_F``. All get the rounding of C to its own type on top:
u_out of its size, and eta, half of the smallest subnormal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from distmm.geometry import accumulator_dtype

__all__ = ["SIGMAS", "Tolerance", "in_type", "stands_out"]

# Bound in standard deviations: lambda of the error bound, and the tail of ``(E X)_i`` over all rows and vectors.
SIGMAS = 8.0

# Times the median residual at which a row stands out. 16 vectors on 10**5 rows of Gaussian errors reach 7 medians.
OUTLIER = 15.0

# Unit roundoff to which float32 operands may be rounded: none, TF32's 11 bits, bfloat16's 8.
ROUNDED_OPERANDS = {"highest": 0.0, "ieee": 0.0, "high": 2.0**-11, "medium": 2.0**-8}


@dataclass(frozen=True)
class Tolerance:
    """Error that a right C may have, and none for integers.

    ``SIGMAS * (sqrt(k) u |A||B| + u_out |C| + eta) + 2 u_in |A||B|``
    """

    dtype: np.dtype
    k: int
    u: float
    u_out: float
    eta: float
    u_in: float = 0.0

    @classmethod
    def of(cls, a: np.dtype, b: np.dtype, c: np.dtype, k: int, precision: str = "highest") -> Tolerance:
        """Tolerance of C of type `c` as a product over `k` of A and B of types `a` and `b`."""
        if c.kind in "iub":
            return cls(c, k, 0.0, 0.0, 0.0)
        accumulator = np.finfo(accumulator_dtype(np.result_type(a, b, c)))
        # The check's own float64 sums err like a float64 product, which matters where C is float64 itself.
        u = float(accumulator.eps + np.finfo(np.float64).eps) / 2
        out = ml_dtypes.finfo(c)
        single = accumulator.dtype == np.float32 and max(a.itemsize, b.itemsize) > 2
        rounded = ROUNDED_OPERANDS[precision] if single else 0.0
        return cls(c, max(1, k), u, float(out.eps) / 2, float(out.smallest_subnormal) / 2, rounded)

    @property
    def exact(self) -> bool:
        """Whether C must be right to the bit."""
        return self.dtype.kind in "iub"

    @property
    def work(self) -> np.dtype:
        """Type in which the check computes."""
        if self.dtype.kind == "b":
            return np.dtype(np.int64)
        return np.dtype(np.uint64) if self.exact else np.dtype(np.complex128 if self.dtype.kind == "c" else np.float64)

    def differ(self, truth: np.ndarray, given: np.ndarray) -> np.ndarray:
        """Where integers differ modulo the width of C; booleans where one is zero and the other is not."""
        if self.dtype.kind == "b":
            return np.asarray((truth != 0) != (given != 0))
        return np.asarray(((truth - given) & np.uint64(2 ** (8 * self.dtype.itemsize) - 1)) != 0)

    def limit(self, spread: np.ndarray, size: np.ndarray, terms: int = 1) -> np.ndarray:
        """Largest error of a right value; arguments as in `ratio`."""
        with np.errstate(invalid="ignore", over="ignore"):
            rounding = SIGMAS * (math.sqrt(self.k) * self.u * spread + self.u_out * size + self.eta * math.sqrt(terms))
            return np.asarray(rounding + 2 * self.u_in * spread)

    def ratio(
        self, truth: np.ndarray, given: np.ndarray, spread: np.ndarray, size: np.ndarray, terms: int = 1
    ) -> np.ndarray:
        """Error over tolerance, element by element; more than 1 is wrong. Values that are both inf or NaN agree.

        `spread` is |A||B|, `size` is |C| (or their root sums of squares over `terms` elements).
        """
        with np.errstate(invalid="ignore", over="ignore"):
            limit = self.limit(spread, size, terms)
            error = np.abs(truth - given)
            ratio: np.ndarray = np.where(error == 0, 0.0, error / np.maximum(limit, np.finfo(float).tiny))
            # A value that C's type rounds to infinity is right as infinity.
            rounded = np.abs(truth) * (1 + self.u_out) > float(ml_dtypes.finfo(self.dtype).max)
        agree = (~np.isfinite(truth) | rounded) & ~np.isfinite(given)
        return np.asarray(np.where(agree, 0.0, np.where(np.isnan(ratio), np.inf, ratio)))


def stands_out(rows: np.ndarray) -> np.ndarray:
    """Rows whose ratio exceeds 1, or is far above what is usual.

    The bound of a row allows for the worst signs of the data, which makes it loose: what stands out is suspect too.
    """
    usual = float(np.median(rows[rows <= 1])) if (rows <= 1).any() else 0.0
    return np.asarray(rows > min(1.0, OUTLIER * usual) if usual > 0 else rows > 1)


def in_type(value: complex, work: np.dtype) -> np.generic:
    """Return a scalar in the type of a check; integers modulo 2**64."""
    scalar: np.generic = np.uint64(int(value.real) % 2**64) if work.kind == "u" else work.type(value)
    return scalar

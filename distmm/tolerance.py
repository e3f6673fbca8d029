"""How far a right C may be from A @ B: error bounds by type and k, for elements and for random combinations of a row.

For one element of a sum of k products (Higham & Mary, SIAM J. Sci. Comput. 2019, theorem 3.1)::

    |E_ij| <= lambda sqrt(k) u (|A||B|)_ij

with high probability, u being the unit roundoff of the accumulator. For random signs x that do not depend on E,
``(E x)_i`` has the standard deviation ``||E_i||_2``, and ``||(|A||B|)_i||_2 <= sum_p |a_ip| ||B_p||_2``. Both get the
rounding of C to its own type on top: u_out of its size, and eta, half of the smallest subnormal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from distmm.geometry import accumulator_dtype
from distmm.operands import Operand

__all__ = ["SIGMAS", "Tolerance"]

# Bound in standard deviations: lambda of the error bound, and the tail of ``(E X)_i`` over all rows and vectors.
SIGMAS = 8.0


@dataclass(frozen=True)
class Tolerance:
    """Error that a right C may have: ``SIGMAS * (sqrt(k) u |A||B| + u_out |C| + eta)``, and none for integers."""

    dtype: np.dtype
    k: int
    u: float
    u_out: float
    eta: float

    @classmethod
    def of(cls, a: Operand, b: Operand, c: Operand) -> Tolerance:
        """Tolerance of C as a product of A and B."""
        if c.dtype.kind in "iub":
            return cls(c.dtype, a.shape[1], 0.0, 0.0, 0.0)
        accumulator = np.finfo(accumulator_dtype(np.result_type(a.dtype, b.dtype, c.dtype)))
        # The check's own float64 sums err like a float64 product, which matters where C is float64 itself.
        u = float(accumulator.eps + np.finfo(np.float64).eps) / 2
        out = ml_dtypes.finfo(c.dtype)
        return cls(c.dtype, max(1, a.shape[1]), u, float(out.eps) / 2, float(out.smallest_subnormal) / 2)

    @property
    def exact(self) -> bool:
        """Whether C must be right to the bit."""
        return self.dtype.kind in "iub"

    @property
    def work(self) -> np.dtype:
        """Type in which the check computes."""
        if self.dtype.kind == "b":
            return np.dtype(np.int64)
        return np.dtype(np.uint64) if self.exact else np.result_type(np.float64, self.dtype)

    def differ(self, truth: np.ndarray, given: np.ndarray) -> np.ndarray:
        """Where integers differ modulo the width of C; booleans where one is zero and the other is not."""
        if self.dtype.kind == "b":
            return np.asarray((truth != 0) != (given != 0))
        return np.asarray(((truth - given) & np.uint64(2 ** (8 * self.dtype.itemsize) - 1)) != 0)

    def ratio(
        self, truth: np.ndarray, given: np.ndarray, spread: np.ndarray, size: np.ndarray, terms: int = 1
    ) -> np.ndarray:
        """Error over tolerance, element by element; more than 1 is wrong. Values that are both inf or NaN agree.

        `spread` is |A||B|, `size` is |C| (or their root sums of squares over `terms` elements).
        """
        with np.errstate(invalid="ignore", over="ignore"):
            limit = SIGMAS * (math.sqrt(self.k) * self.u * spread + self.u_out * size + self.eta * math.sqrt(terms))
            error = np.abs(truth - given)
            ratio: np.ndarray = np.where(error == 0, 0.0, error / np.maximum(limit, np.finfo(float).tiny))
            # A value that C's type rounds to infinity is right as infinity.
            rounded = np.abs(truth) * (1 + self.u_out) > np.finfo(self.dtype).max
        agree = (~np.isfinite(truth) | rounded) & ~np.isfinite(given)
        return np.asarray(np.where(agree, 0.0, np.where(np.isnan(ratio), np.inf, ratio)))

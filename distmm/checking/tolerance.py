"""How far a right C may be from alpha A @ B + beta C0: error bounds by type, k and precision.

For one element of a sum of k products (Higham & Mary, SIAM J. Sci. Comput. 2019, theorem 3.1)::

    |E_ij| <= lambda sqrt(k) u (|A||B|)_ij + eta

with high probability, u being the unit roundoff of the accumulator. Where the precision allows that operands are
rounded to fewer digits first, each product has a relative error of at most 2 u_in, and the sum one of 2 u_in |A||B|.
C is rounded to its own type on top, by u_out of its size. Tensor cores add 16-bit products without rounding: each
instruction of 16 steps cuts the sum and its products off, by at most `CUT_OFF` of |A||B|, and after `STRETCH` steps the
sum is added in float32. These errors have one sign where numbers do. They too count as 2 u_in.

*Dependence.* In sums of equal numbers the additions round the same way, and the error grows with k instead of its root.
How far some elements are from independent roundings is measured (`distmm.checking.sampled_elements.dependence`), and
lambda is multiplied by that; it is 1 for most data.

*Underflow.* Each of the k multiplications and k additions may replace a result below the smallest normal number of the
accumulator, ``tiny``, by a subnormal number or by zero (flush to zero). These errors may all have one sign, so they add
up to 2 k tiny, times alpha. The products with alpha and beta and their sum add three more. The last rounding adds half
of the smallest subnormal number of C's type. Together: ``eta = 2 (k + 2) tiny + subnormal / 2``,
times |alpha| where that is above 1.

*Random vectors.* Column j of C is multiplied by ``x_j = w_j r_j``, where the r_j have mean square 1 and do not depend
on E, and the weights w_j are powers of two that bring the columns of B to one size. The error of the sum has the
standard deviation ``||E_i w||_2``, and with ``B_p`` for the rows of B::

    ||(|A||B|)_i w||_2 <= sum_p |a_ip| ||B_p w||_2 <= ||a_i||_2 ||B w||_F,     ||eta w||_2 = eta ||w||_2

So an error in column j shows if it is large beside column j of B, whatever the other columns are. Rows need no weights,
because each row of C is compared with a bound of its own.

*The check's own sums.* It adds n products of a row of C, and of each row of B, with numbers of a vector, in float64.
By the same theorem these sums err by sqrt(n) u_64 of their size, which shows where C is float64 itself. They do not
depend on the errors of C, so that the squares of both are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from distmm.checking.scaling import scaled
from distmm.planning.precision import Precision, check_precision
from distmm.planning.problem import accumulator_dtype

__all__ = ["FORMULA", "SIGMAS", "Tolerance", "in_type", "mantissa", "stands_out"]

FORMULA = (
    "SIGMAS (sqrt(k d^2 u^2 + n u_64^2) |A||B| + sqrt(u_out^2 + n u_64^2) |C| + eta) + 2 u_in |A||B|, for n columns "
    "times weighted random vectors; d is 1 unless roundings depend on each other; and 64 elements by their partial sums"
)

DOUBLE = 2.0**-53  # u_64: unit roundoff of float64, in which the check adds

# Bound in standard deviations: lambda of the error bound, and the tail of ``(E X)_i`` over all rows and vectors.
SIGMAS = 8.0

# Times the median residual at which a row stands out. 16 vectors on 10**5 rows of Gaussian errors reach 7 medians.
OUTLIER = 15.0

# Unit roundoff to which float32 operands may be rounded: none, TF32's 11 bits, bfloat16's 8.
ROUNDOFF: dict[Precision, float] = {"highest": 0.0, "ieee": 0.0, "high": 2.0**-11, "medium": 2.0**-8}

# What distmm_kernels.tiles.hopper_tiles.STRETCH says of tensor cores.
STRETCH = 8192
CUT_OFF = 17 * 2.0**-25 + 2.0**-23


@dataclass(frozen=True)
class Tolerance:
    """Error that a right C may have, and none for integers: `FORMULA`.

    Attributes
    ----------
    dtype : numpy.dtype
        Of C.
    k : int
    u, u_out, u_in : float
        Unit roundoffs of the accumulator, of C, and of operands that may be rounded first (0: they may not), or half of
        what tensor cores cut off.
    eta : float
        Underflow in one element.
    most, most_sum : float
        Largest finite numbers of C's type, and of the accumulator.
    cuts : bool
        Whether u_in is what tensor cores cut off.
    """

    dtype: np.dtype
    k: int
    u: float
    u_out: float
    eta: float
    u_in: float = 0.0
    most: float = math.inf
    most_sum: float = math.inf
    cuts: bool = False

    @classmethod
    def of(cls, a: np.dtype, b: np.dtype, c: np.dtype, k: int, precision: Precision = "highest") -> Tolerance:
        """Tolerance of C of type `c` as a product over `k` of A and B of types `a` and `b`.

        Raises
        ------
        InputError
            If there is no such precision.
        """
        check_precision(precision)
        if c.kind in "iub":
            return cls(c, k, 0.0, 0.0, 0.0)
        accumulator = np.finfo(accumulator_dtype(np.result_type(a, b, c)))
        # The check's own float64 sums err like a float64 product, which matters where C is float64 itself.
        u = float(accumulator.eps + np.finfo(np.float64).eps) / 2
        out = ml_dtypes.finfo(c)
        single = accumulator.dtype == np.float32 and max(a.itemsize, b.itemsize) > 2
        rounded = ROUNDOFF[precision] if single else 0.0
        cuts = accumulator.dtype == np.float32 and not single
        if cuts:
            rounded = CUT_OFF * math.ceil(min(k, STRETCH) / 16) / 2
        eta = 2 * (k + 2) * float(accumulator.tiny) + float(out.smallest_subnormal) / 2
        limits = float(out.max), float(accumulator.max)
        return cls(c, max(1, k), u, float(out.eps) / 2, eta, rounded, *limits, cuts)

    @property
    def exact(self) -> bool:
        """Whether C must be right to the bit."""
        return self.dtype.kind in "iub"

    @property
    def narrow(self) -> bool:
        """Whether sums are made in float32."""
        return self.u > 2.0**-30

    @property
    def work(self) -> np.dtype:
        """Type in which the check computes."""
        if self.dtype.kind == "b":
            return np.dtype(np.int64)
        return np.dtype(np.uint64) if self.exact else np.dtype(np.complex128 if self.dtype.kind == "c" else np.float64)

    @property
    def sketched(self) -> np.dtype:
        """Type of a job's sums: `work`, but 32 bits for integers that have no more, which CPUs add much faster."""
        return np.dtype(np.uint32) if self.dtype.kind in "iu" and self.dtype.itemsize <= 4 else self.work

    def differ(self, truth: np.ndarray, given: np.ndarray) -> np.ndarray:
        """Where integers differ modulo the width of C; booleans where one is zero and the other is not."""
        if self.dtype.kind == "b":
            return np.asarray((truth != 0) != (given != 0))
        return np.asarray(((truth - given) & np.uint64(2 ** (8 * self.dtype.itemsize) - 1)) != 0)

    def underflow(self, alpha: complex, columns: np.ndarray | None = None) -> float:
        """Return the most that underflow changes: in an element, or in a row with columns divided by ``2**columns``."""
        eta = self.eta * max(1.0, abs(alpha))
        if columns is None or not columns.size:
            return eta
        least = int(columns.min())
        return float(np.ldexp(eta * np.linalg.norm(np.ldexp(1.0, least - columns)), -least))

    def limit(
        self,
        spread: np.ndarray | float,
        size: np.ndarray,
        underflow: np.ndarray | float,
        columns: int = 0,
        dependence: float = 1.0,
    ) -> np.ndarray:
        """Largest error of a right value.

        `spread` is |A||B| and `size` is |C|, or norms of these over a row whose `columns` the check has added.
        `dependence` is how much more the roundings of a sum may be than independent ones, at most all of k.
        """
        added = math.sqrt(columns) * DOUBLE
        steps = math.sqrt(self.k) * min(dependence, math.sqrt(self.k))
        with np.errstate(invalid="ignore", over="ignore"):
            by_products, by_rounding = math.hypot(steps * self.u, added), math.hypot(self.u_out, added)
            rounding = SIGMAS * (by_products * spread + by_rounding * size + underflow)
            return np.asarray(rounding + 2 * self.u_in * spread)

    def ratio(self, truth: np.ndarray, given: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """Error over its limit; more than 1 is wrong. Infinity where there is no finite error or no finite limit."""
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(truth - given)
            ratio = np.where(error == 0, 0.0, error / np.maximum(limit, np.finfo(float).tiny))
            return np.asarray(np.where(np.isfinite(error) & np.isfinite(limit), ratio, np.inf))

    def elements(
        self,
        truth: np.ndarray,
        given: np.ndarray,
        spread: np.ndarray,
        shift: np.ndarray,
        alpha: complex,
        dependence: float = 1.0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compare single elements of C.

        Parameters
        ----------
        truth, spread : arrays
            ``A @ B`` and ``|A| @ |B|``, times alpha, over ``2**shift``.
        given : array
            C as it is.
        shift : array of int
        alpha : scalar
        dependence : float
            As of `limit`.

        Returns
        -------
        ratios : array
            As of `ratio`.
        unknown : array of bool
            Where float64 cannot tell: C is inf or NaN, the product is finite, and a sum on the way to it may have
            overflowed, which depends on the order in which a kernel adds.
        """
        eta = self.underflow(alpha)
        common = np.maximum(shift, math.frexp(eta)[1])  # a power of two larger than what is lost anyway
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            truth, spread = (scaled(values, shift - common) for values in (truth, spread))
            limit = self.limit(spread, np.abs(truth), np.ldexp(eta, -common), dependence=dependence)
            ratio = self.ratio(truth, scaled(given, -common), limit)
            finite, infinite = np.isfinite(truth), ~np.isfinite(given)
            overflows = np.abs(truth) + limit > np.ldexp(self.most, -common)
            if given.dtype.kind != "c":
                overflows &= given == np.copysign(np.inf, truth)
            least = 1.0 if alpha == 0 else min(1.0, abs(alpha))
            # Complex products by three real ones have (re + im)(re + im) among their sums: twice the products.
            sums = 2 * spread if given.dtype.kind == "c" else spread
            may_overflow = sums + limit > np.ldexp(self.most_sum * least, -common)
        unknown = infinite & finite & ~overflows & may_overflow
        agree = infinite & (~finite | overflows)
        return np.where(agree | unknown, 0.0, ratio), unknown


def stands_out(rows: np.ndarray, rounding: np.ndarray | None = None) -> np.ndarray:
    """Return which rows have a ratio above 1, or far above the median.

    The bound of a row allows for the worst signs of the data, which makes it loose. So rows far above the median are
    suspect too. `rounding` is the ratio that the last rounding of each row may have. Where it is given, an error has to
    be far above the median beside it, too: rows with some large terms have larger errors, and are larger themselves.
    """
    out = rows > 1
    usual = _usual(rows, out)
    if usual == 0:
        return np.asarray(out)
    far = rows > OUTLIER * usual
    if rounding is not None:
        beside = rows / np.maximum(rounding, np.finfo(float).tiny)
        far &= (beside > OUTLIER * _usual(beside, out)) & (rows > 2 / SIGMAS * rounding)
    return np.asarray(out | far)


def _usual(rows: np.ndarray, out: np.ndarray) -> float:
    return 0.0 if out.all() else float(np.median(rows[~out]))


def in_type(value: complex, work: np.dtype) -> np.generic:
    """Return a scalar in the type of a check; integers modulo 2**64, or 2**32."""
    scalar: np.generic = work.type(int(value.real) % 2 ** (8 * work.itemsize) if work.kind == "u" else value)
    return scalar


def mantissa(value: complex) -> tuple[complex, int]:
    """Return a scalar of absolute value 0.5 to 1, or 0, and the exponent of the power of two that it is times."""
    exponent = math.frexp(max(abs(value.real), abs(value.imag)))[1]
    parts = (math.ldexp(value.real, -exponent), math.ldexp(value.imag, -exponent))
    return (complex(*parts) if isinstance(value, complex) else parts[0]), exponent

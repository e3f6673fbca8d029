"""Error bounds of a right C = alpha A @ B + beta C0, by type, k and precision.

For one element, a sum of k products (Higham & Mary, SIAM J. Sci. Comput. 2019, theorem 3.1)::

    |E_ij| <= lambda sqrt(k) u (|A||B|)_ij + eta

with high probability, where u is the unit roundoff of the accumulator. C is then rounded to its own type, with a
relative error of u_out. If the precision allows operands to be rounded to fewer digits first, each product has a
relative error of at most 2 u_in, and the sum an error of 2 u_in |A||B|. Tensor cores add 16-bit products without
rounding. Each instruction of 16 steps truncates the sum and its products, by at most `CUT_OFF` of |A||B|. After
`STRETCH` steps the sum is added in float32. If all numbers have the same sign, so have these errors: 2 u_in, too.

*Dependence.* In sums of equal numbers all additions round in the same direction, and the error grows with k instead of
sqrt(k). `distmm.checking.sampled_elements.dependence` measures a factor of lambda from some elements. It is mostly 1.

*Underflow.* Each of the k multiplications and k additions may replace a result below the smallest normal number of the
accumulator, ``tiny``, by a subnormal number or by zero (flush to zero). These errors may all have the same sign, so
they add up to 2 k tiny, times alpha. The products with alpha and beta, and their sum, add three more. The last rounding
adds half of the smallest subnormal number of C's type. Together: ``eta = 2 (k + 2) tiny + subnormal / 2``, times
|alpha| if that is above 1.

*Random vectors.* Column j of C is multiplied by ``x_j = w_j r_j``. The r_j have mean square 1 and do not depend on E.
The weights w_j are powers of two that give the columns of B a common size. The error of the sum has the standard
deviation ``||E_i w||_2``. It exceeds `SIGMAS` of them with a probability below 3e-14 for each row and vector: the r_j
are symmetric, and their even moments are not larger than those of a normal number, so their sums are sub-Gaussian. With
``B_p`` for the rows of B::

    ||(|A||B|)_i w||_2 <= sum_p |a_ip| ||B_p w||_2 <= ||a_i||_2 ||B w||_F,     ||eta w||_2 = eta ||w||_2

So an error in column j is detected if it is large compared with column j of B, for any sizes of the other columns. Rows
need no weights, because each row of C has its own bound.

*Sums of the check.* The check adds n products of a row of C, and of each row of B, with a vector, in float64. By the
same theorem these sums have a relative error of sqrt(n) u_64, which matters if C is float64. It does not depend on the
errors of C, so the squares of both are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from distmm_kernels.config import FLOAT8, compute_dtype, result_type
from distmm_kernels.tiles.hopper_tiles import STRETCH as STRETCH
from distmm_kernels.tiles.hopper_tiles import STRETCH_OF_FLOAT8

FORMULA = (
    "SIGMAS (sqrt(k d^2 u^2 + n u_64^2) |A||B| + sqrt(u_out^2 + n u_64^2) |C| + eta) + 2 u_in |A||B|, for n columns "
    "times weighted random vectors; d is 1 unless roundings depend on each other; and 64 elements by their partial sums"
)

DOUBLE = 2.0**-53  # u_64: unit roundoff of float64, the type of the check's sums

SIGMAS = 8.0  # standard deviations of the bound: lambda above, and the tail of ``(E X)_i`` over all rows and vectors

# Unit roundoff to which float32 operands may be rounded: none, TF32's 11 bits, bfloat16's 8.
ROUNDOFF = {"highest": 0.0, "ieee": 0.0, "high": 2.0**-11, "medium": 2.0**-8}

# By how much tensor cores truncate a sum and its products, relative to |A||B|: `distmm_kernels.tiles.hopper_tiles` says
# why, and after how many steps the sum is added in float32. An instruction has 16 steps; of 8-bit floats, 32.
CUT_OFF = 17 * 2.0**-25 + 2.0**-23
CUT_OFF_OF_FLOAT8 = 34 * 2.0**-13


@dataclass(frozen=True)
class Tolerance:
    """The largest error of a right C, by `FORMULA`. Integers must be exact."""

    dtype: np.dtype  # of C
    k: int  # number of products in each sum
    u: float  # unit roundoff of the accumulator
    u_out: float  # unit roundoff of C
    eta: float  # error by underflow in one element
    u_in: float = 0.0  # unit roundoff of operands that may be rounded first, or half of the truncation in tensor cores
    most: float = math.inf  # largest finite number of C's type
    most_sum: float = math.inf  # largest finite number of the accumulator
    cuts: bool = False  # whether u_in is the truncation in tensor cores of 16-bit products

    @classmethod
    def of(cls, a: np.dtype, b: np.dtype, c: np.dtype, k: int, precision: str = "highest") -> Tolerance:
        """Return the tolerance of a C of type `c`, the product over `k` of A and B of types `a` and `b`."""
        if c.kind in "iub":
            return cls(c, k, 0.0, 0.0, 0.0)
        accumulator = np.finfo(compute_dtype(result_type(a, b, c)))
        # The check's float64 sums err like a float64 product, which matters if C is float64.
        u = float(accumulator.eps + np.finfo(np.float64).eps) / 2
        out = ml_dtypes.finfo(c)
        single = accumulator.dtype == np.float32 and max(a.itemsize, b.itemsize) > 2
        rounded = ROUNDOFF[precision] if single else 0.0
        cuts = accumulator.dtype == np.float32 and not single
        if cuts and a in FLOAT8 and b in FLOAT8 and precision in ("high", "medium"):
            rounded, cuts = CUT_OFF_OF_FLOAT8 * math.ceil(min(k, STRETCH_OF_FLOAT8) / 32) / 2, False
        elif cuts:
            rounded = CUT_OFF * math.ceil(min(k, STRETCH) / 16) / 2
        eta = 2 * (k + 2) * float(accumulator.tiny) + float(out.smallest_subnormal) / 2
        limits = float(out.max), float(accumulator.max)
        return cls(c, max(1, k), u, float(out.eps) / 2, eta, rounded, *limits, cuts)

    @property
    def exact(self) -> bool:
        """Whether C must be exact, bit for bit."""
        return self.dtype.kind in "iub"

    @property
    def narrow(self) -> bool:
        """Whether the accumulator is float32."""
        return self.u > 2.0**-30

    @property
    def work(self) -> np.dtype:
        """Type in which the check computes."""
        return np.dtype({"b": "i8", "i": "u8", "u": "u8", "c": "c16"}.get(self.dtype.kind, "f8"))

    @property
    def sketched(self) -> np.dtype:
        """Type of a job's sums: `work`, but 32 bits for integers of at most 32 bits, which CPUs add much faster."""
        return np.dtype(np.uint32) if self.dtype.kind in "iu" and self.dtype.itemsize <= 4 else self.work

    def differ(self, truth: np.ndarray, given: np.ndarray) -> np.ndarray:
        """Return where integers differ modulo 2**w (w: bits of C's type), and where booleans differ."""
        if self.dtype.kind == "b":
            return np.asarray((truth != 0) != (given != 0))
        return np.asarray(((truth - given) & np.uint64(2 ** (8 * self.dtype.itemsize) - 1)) != 0)

    def underflow(self, alpha: complex, columns: np.ndarray | None = None) -> float:
        """Return the largest error by underflow: of an element, or of a row with columns divided by ``2**columns``."""
        eta = self.eta * max(1.0, abs(alpha))
        if columns is None or not columns.size:
            return eta
        least = int(columns.min())
        return float(np.ldexp(eta * np.linalg.norm(np.ldexp(1.0, least - columns)), -least))

    def limit(
        self, spread: np.ndarray | float, size: np.ndarray, underflow: np.ndarray | float, columns: int = 0,
        dependence: float = 1.0, sums: float = DOUBLE,
    ) -> np.ndarray:  # fmt: skip
        """Return the largest error of a right value.

        `spread` is |A||B|, `size` is |C|, or both are their norms over a row of which the check has summed so many
        `columns` (0 for single elements), in a type of unit roundoff `sums`. At most sqrt(k) of the factor `dependence`
        for dependent roundings is used.
        """
        added = math.sqrt(columns) * sums
        steps = math.sqrt(self.k) * min(dependence, math.sqrt(self.k))
        with np.errstate(invalid="ignore", over="ignore"):
            by_products, by_rounding = math.hypot(steps * self.u, added), math.hypot(self.u_out, added)
            rounding = SIGMAS * (by_products * spread + by_rounding * size + underflow)
            return np.asarray(rounding + 2 * self.u_in * spread)


def in_type(value: complex, work: np.dtype) -> np.generic:
    """Return a scalar in the type of a check. Integers are reduced modulo 2**64, or 2**32."""
    return work.type(int(value.real) % 2 ** (8 * work.itemsize) if work.kind == "u" else value)


def mantissa(value: complex) -> tuple[complex, int]:
    """Split a scalar into a factor, whose larger part has a size from 0.5 to 1, and the exponent of a power of two."""
    exponent = math.frexp(max(abs(value.real), abs(value.imag)))[1]
    parts = (math.ldexp(value.real, -exponent), math.ldexp(value.imag, -exponent))
    return (complex(*parts) if isinstance(value, complex) else parts[0]), exponent

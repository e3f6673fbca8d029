"""Compares C with A and B: rows times random vectors, or single elements. Jobs and `verify` both use it."""

from __future__ import annotations

import numpy as np

from distmm.checking.scaling import scaled
from distmm.checking.thin_products import Sums
from distmm_kernels.tolerance import SIGMAS, Tolerance, in_type, mantissa

# A row of a job is an outlier above this multiple of the median residual. Gaussian errors of 10**5 rows reach 5.
OUTLIER = 15.0


def compared(
    tolerance: Tolerance, left: Sums, right: Sums, columns: np.ndarray, alpha: complex = 1, dependence: float = 1.0,
    more: Sums | None = None, beta: complex = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Compare rows of C times vectors (`right`) with rows of A times the products of B and these vectors (`left`).

    The sizes ``(m, e)`` of `left` are norms of the rows of |A||B|, with columns divided by their weights. `columns` has
    the exponents ``(e, n)`` of these weights, `more` is C0 times the vectors, and `dependence` as in `Tolerance.limit`.

    Returns
    -------
    ratio : array of shape (m, v)
        Errors divided by their limits. Infinity where integers differ, or where C has inf or NaN that no partial sum
        can have.
    rounding : array of shape (m,)
        The ratio that the last rounding of each row may reach.
    known : bool array of shape (m, v)
        False where inf or NaN make the comparison impossible.
    """
    work = tolerance.sketched
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if tolerance.exact:
            truth = left.values * in_type(alpha, work) + (0 if more is None else more.values * in_type(beta, work))
            ratio = np.where(tolerance.differ(truth, right.values), np.inf, 0.0)
            return ratio, np.zeros(len(ratio)), np.ones(ratio.shape, bool)
        factor, exponent = mantissa(alpha)
        underflow = np.array([tolerance.underflow(alpha, each) for each in columns])
        # The largest power of two of all compared values, and of the error by underflow.
        shift, lost = left.exponents + exponent, np.frexp(underflow)[1]
        common = np.maximum(np.maximum(shift, right.exponents), lost)
        if more is not None:
            beta_factor, beta_exponent = mantissa(beta)
            by_beta = more.exponents + beta_exponent
            common = np.maximum(common, by_beta)
        truth = scaled(left.values * in_type(factor, work), shift - common)
        spread, size = scaled(abs(factor) * left.sizes, shift - common), scaled(right.norms, right.exponents - common)
        if more is not None:
            truth = truth + scaled(more.values * in_type(beta_factor, work), by_beta - common)
            size = size + scaled(abs(beta_factor) * more.norms, by_beta - common)
        given = scaled(right.values, right.exponents - common)
        lost_by_rounding = size, scaled(underflow, -common), columns.shape[1]
        limit = tolerance.limit(spread, *lost_by_rounding, dependence)
        error = abs(truth - given)
        ratio = np.where(error == 0, 0.0, error / np.maximum(limit, np.finfo(float).tiny))
        ratio[~(np.isfinite(error) & np.isfinite(limit))] = np.inf
        rounding = (tolerance.limit(0.0, *lost_by_rounding) / limit).max(axis=1, initial=0.0)
        # If no partial sum can have overflowed, inf and NaN in C are wrong.
        most = int(columns.max(initial=0))
        reach = scaled(max(1.0, abs(alpha)) * left.sizes, left.exponents + most)
        if more is not None:
            reach = reach + abs(beta) * scaled(more.norms, more.exponents + most)
        invented = np.isfinite(truth) & ~np.isfinite(given) & (reach < min(tolerance.most, tolerance.most_sum) / 2)
    known = np.isfinite(truth) & np.isfinite(given) & np.isfinite(spread) & np.isfinite(size)
    return ratio, rounding, known | invented


def elements(
    tolerance: Tolerance, left: Sums, given: np.ndarray, alpha: complex = 1, dependence: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare elements of C. The values of `left` are elements of A @ B, and its sizes those of |A||B|.

    Returns
    -------
    truth, ratio : arrays
        The right elements, infinite if they are beyond float64's range, and the errors divided by their limits.
    unknown : bool array
        Elements that float64 cannot decide: C is inf or NaN, the product is finite, and a partial sum may have
        overflowed, depending on the order in which a kernel adds.
    """
    right = Sums(given, abs(given), np.zeros((1, 1), np.int32), left.sizes)
    ratio, _, known = compared(tolerance, left, right, np.zeros((1, 0), np.int32), alpha, dependence)
    factor, exponent = (alpha, 0) if tolerance.exact else mantissa(alpha)
    truth = left.values * in_type(factor, tolerance.sketched)
    if tolerance.exact:
        return truth, ratio, ~known
    finite, infinite = np.isfinite(truth), ~np.isfinite(given)
    with np.errstate(over="ignore", invalid="ignore"):
        truth = scaled(truth, left.exponents + exponent)
        beyond = np.abs(truth) > tolerance.most
        if given.dtype.kind != "c":
            beyond &= given == np.copysign(np.inf, truth)
    agree = infinite & (~finite | beyond)
    unknown = infinite & ~agree & ~known
    return truth, np.where(agree | unknown, 0.0, ratio), unknown


def stands_out(rows: np.ndarray, rounding: np.ndarray | None = None, above: float = OUTLIER) -> np.ndarray:
    """Return which rows have a ratio above 1, or far above the median.

    The bound of a row allows for the worst signs of the data, so it is loose. Rows far above the median are therefore
    suspect, too. If `rounding` is given, the ratio that the last rounding of each row may reach, they must also be far
    above the median after division by it. Rows with some large terms have larger errors, because they are larger.
    """
    out = rows > 1
    usual = _usual(rows, out)
    far = (rows > above * usual) & (usual > 0)
    if rounding is not None and far.any():
        relative = rows / np.maximum(rounding, np.finfo(float).tiny)
        far &= (relative > above * _usual(relative, out)) & (rows > 2 / SIGMAS * rounding)
    return np.asarray(out | far)


def _usual(rows: np.ndarray, out: np.ndarray) -> float:
    """Return the median of the rows that are not `out`."""
    return 0.0 if out.all() else float(np.median(rows[~out]))

r"""Is the rounding of a block of C that of its precision? Some elements, computed again in float64 from A and B.

The bound of `distmm.checking.tolerance` holds for any data, so it is loose: at k = 65536 a product of normal numbers
may have ten thousand times the error that float32 has. TF32 operands, or a step of k that was left out, stay within it.
The elements here have a bound that follows from the sums that really occurred.

*The bound.* Let ``s_1, s_2 ...`` be the partial sums of an element. Each addition errs by ``delta_p s_p`` with
``|delta_p| <= u``. If the delta_p are independent of each other in the mean, the error is sub-Gaussian (Higham & Mary,
SIAM J. Sci. Comput. 41, 2019, theorem 2.4 and lemma 3.1: Azuma and Hoeffding; Ipsen & Zhou, SIAM J. Matrix Anal. Appl.
41, 2020, theorem 3.4, have it for the partial sums that occur)::

    P(|error| > t L) <= 2 exp(-t^2 / 2),     L^2 = u^2 sum_p s_p^2

The partial sums are known here: a task sums the products of each sampled element once more, in float64. Kernels add in
other orders. L takes the largest of three kinds of sums: those in ascending k, in descending k, and of kernels that add
each second, fourth, eighth or sixteenth product by itself. Added to L^2 are, each squared,

- what halves and tensor cores lose in float32 (`distmm_kernels`: ``fp16x3``, ``tf32x3``), 2^-20 of the element, of
  each product and of each sum of 16 products, and 2^-38 of the largest number of a row or column times the others;
- the last rounding to C's type, and those of alpha, beta and C0.

Some errors may have one sign. They are subtracted from what is seen: 2 u_in |A||B| where operands may be rounded,
underflow, and in 16 bits what tensor cores cut off: `CUT_OFF` of each sixteenth partial sum, and of the products there.

*Roundings that are not independent.* In a sum of equal numbers each addition may round the same way. A plain chain of
k = 4096 then errs by more than 8 standard deviations. So some elements are also summed in float32, by a plain chain; L
is multiplied by twice its error over L where that is above 1 (`dependence`), and so is the bound of rows. Numbers of
float64 are multiplied by an odd factor first, so that they have no fewer digits in float32 than a chain of float64 can
lose. The chain is in ascending k, as those of all kernels are. (A kernel that added long sorted rows in descending k
might be called wrong.)

*The test.* Let r be the ratios of N errors to their L. For independent sub-Gaussian r (Chernoff's bound with
``E exp(x r^2) <= (1 - 2 x)^(-1/2)``; Hsu, Kakade & Zhang, Electron. Commun. Probab. 17, 2012)::

    P(mean r^2 > t^2) <= exp(-N (t^2 - 1 - ln t^2) / 2)

t is chosen for `FALSE_ALARM`: 1.6 for 64 elements, 6.8 for a single one. Elements with equal values count once in N.
A chain of float32 has r of about 0.4, and a BLAS less than 0.1.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from distmm.checking.sampled_sums import EDGE, GROUP, Sample, lines
from distmm.checking.tolerance import CUT_OFF, Tolerance

__all__ = ["FALSE_ALARM", "dependence", "level", "threshold"]

# Probability that a right block is taken for a wrong one.
FALSE_ALARM = 1e-9

# What float32 products of halves may lose beside L: of sums and products; of the largest number of a row or column.
HALVES, COARSE = 2.0**-20, 2.0**-38

Block = Any  # a NumPy or CuPy array


def _squares(sample: Sample) -> np.ndarray:
    """Sum the squares of the partial sums by the worst order: in descending k they are what is left of the sum."""
    left = GROUP * sample.sums * (sample.sixteenths * sample.sums - 2 * sample.totals)
    return np.asarray(np.maximum(sample.squares, sample.squares + left))


@lru_cache
def threshold(count: int) -> float:
    """Root mean square of `count` independent ratios that right ones exceed with probability `FALSE_ALARM`.

    Examples
    --------
    >>> [round(threshold(count), 1) for count in (1, 8, 64)]
    [6.8, 2.9, 1.6]
    """
    goal, low, high = -2 * math.log(FALSE_ALARM) / count, 1.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle - 1 - math.log(middle) < goal else (low, middle)
    return math.sqrt(high)


def level(
    tolerance: Tolerance,
    sample: Sample,
    position: int,
    block: Block,
    alpha: complex = 1,
    beta: complex = 0,
    added: np.ndarray | None = None,
) -> tuple[float, int]:
    """Compare the sampled elements of a block of C with the sums.

    Parameters
    ----------
    tolerance : Tolerance
    sample : Sample
        Over all panels.
    position : int
        Place of this block among those of `sample`.
    block : NumPy or CuPy array of shape (m, n)
    alpha, beta : scalars
    added : array of shape (m, n), optional
        The C that was there before, in host memory.

    Returns
    -------
    level : float
        Root mean square of the ratios over `threshold`: above 1, the block is not of its precision.
    row : int
        Of the largest ratio, in the block.
    """
    at, keep = np.unique(sample.columns[position], return_index=True)
    own = position * EDGE + keep
    given = lines(block, sample.rows, at).astype(tolerance.work)
    names = "terms", "groups", "spread", "cut", "coarse"
    mine = {name: getattr(sample, name)[..., own].sum(axis=0) for name in names}
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        whole = sample.sums[..., own]
        product = whole[0] if len(whole) == 1 else (whole[0] - whole[1]) + 1j * (whole[2] + whole[3])
        truth, size = alpha * product, abs(alpha) * abs(whole).sum(axis=0)
        if added is not None:
            before = beta * lines(added, sample.rows, at).astype(tolerance.work)
            truth, size = truth + before, size + abs(before)
        # Complex products by three real ones add the parts before: twice the sums.
        walk = _squares(sample)[..., own].sum(axis=0) * (1 if len(whole) == 1 else 4)
        walk *= (tolerance.u * dependence(sample, position)) ** 2
        halves = HALVES**2 * ((whole**2).sum(axis=0) + mine["terms"] + mine["groups"]) + COARSE**2 * mine["coarse"]
        rounding = (tolerance.u_out * abs(truth)) ** 2 + (4 * tolerance.u * size) ** 2
        limit = np.sqrt(abs(alpha) ** 2 * (walk + halves) + rounding)
        if tolerance.cuts:
            sure = CUT_OFF * (mine["cut"] + np.sqrt(sample.sixteenths * mine["terms"]))
        else:
            sure = 2 * tolerance.u_in * mine["spread"]
        sure = abs(alpha) * sure + tolerance.underflow(alpha)
        error = np.maximum(abs(truth - given) - sure, 0)
        ratio = np.where(error == 0, 0.0, error / limit)
    counts = np.isfinite(truth) & np.isfinite(given) & np.isfinite(limit) & (abs(truth) + sure < tolerance.most / 2)
    number = len(np.unique(truth[counts & (mine["terms"] > 0)]))
    ratio = np.where(counts, ratio, 0.0)
    row = int(sample.rows[np.argmax(ratio.max(axis=1, initial=0.0))])
    return math.sqrt((ratio**2).sum() / max(1, counts.sum())) / threshold(max(1, number)), row


def dependence(sample: Sample, position: int) -> float:
    """How many times L a right product may err, because its roundings are not independent: 1 for most data.

    Parameters
    ----------
    sample : Sample
    position : int
        Of the block among those of `sample`.
    """
    pairs = np.arange(sample.chain.shape[1])
    own = position * EDGE + pairs
    with np.errstate(invalid="ignore", over="ignore"):
        error = sample.chain[..., position] - sample.sums[:, pairs, own]
        bound = 2.0**-48 * _squares(sample)[:, pairs, own]  # u of float32 is 2^-24
    known = np.isfinite(error) & np.isfinite(bound) & (bound > 0)
    return max(1.0, 2 * math.sqrt(np.mean(error[known] ** 2 / bound[known]))) if known.any() else 1.0

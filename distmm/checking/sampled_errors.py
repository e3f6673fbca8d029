r"""Compares sampled elements of C with float64 sums, to check that a block has the rounding of its precision.

The bound of `distmm_kernels.tolerance` holds for any data, so it is loose. At k = 65536 it allows a product of normal
numbers ten thousand times the error of float32, and misses TF32 operands, or one missing step of k. The bound of the
sampled elements is sharper, because it follows from their own partial sums.

*The bound.* Let ``s_1, s_2 ...`` be the partial sums of an element. Each addition errs by ``delta_p s_p`` with
``|delta_p| <= u``. If the delta_p are independent of each other in the mean, the error is sub-Gaussian (Higham & Mary,
SIAM J. Sci. Comput. 41, 2019, theorem 2.4 and lemma 3.1: Azuma and Hoeffding; Ipsen & Zhou, SIAM J. Matrix Anal. Appl.
41, 2020, theorem 3.4, have it for the partial sums that occur)::

    P(|error| > t L) <= 2 exp(-t^2 / 2),     L^2 = u^2 sum_p s_p^2

A task sums the products of each sampled element again, in float64, to know the partial sums. Kernels add in different
orders. So L uses the largest of these sums of squares: in ascending k, in descending k, and of kernels that sum each
second, fourth, eighth or sixteenth product separately. These terms are added to L^2, each squared:

- the error of float32 products by halves and tensor cores (`distmm_kernels`: ``fp16x3``, ``tf32x3``): 2^-20 of the
  element, of each product and of each sum of 16 products, and 2^-38 of the largest number of a row (column) times the
  numbers of the column (row);
- the last rounding to C's type, and the roundings of alpha, beta and C0.

Some errors may all have the same sign. They are subtracted from the observed error: 2 u_in |A||B| if operands may be
rounded, underflow, and for 16-bit types the truncation in tensor cores: `CUT_OFF` of the partial sum after each group
of 16 products, and of the products in the group.

*Dependent roundings.* In a sum of equal numbers all additions may round in the same direction. A plain chain of
k = 4096 then errs by more than 8 standard deviations. So some elements are also summed by a plain float32 chain, in
ascending k as in all kernels. (A kernel that summed long sorted rows in descending k could be called wrong.) If twice
the error of the chain is larger than L, L and the bound of rows are multiplied by that ratio (`Sample.dependence`).
float64 numbers are first multiplied by an irrational factor: the chain then loses as many digits as a float64 chain
can.

*The test.* Let r be the ratios of N errors to their L. For independent sub-Gaussian r (Chernoff's bound with
``E exp(x r^2) <= (1 - 2 x)^(-1/2)``; Hsu, Kakade & Zhang, Electron. Commun. Probab. 17, 2012)::

    P(mean r^2 > t^2) <= exp(-N (t^2 - 1 - ln t^2) / 2)

t is chosen for the probability `FALSE_ALARM`: 1.6 for 64 elements, 6.8 for one element. Elements with equal values
count once in N. A float32 chain has r of about 0.4, and a BLAS less than 0.1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from distmm.checking.sampled_elements import EDGE, Sample, lines
from distmm.checking.scaling import Block
from distmm_kernels.tolerance import CUT_OFF, Tolerance

FALSE_ALARM = 1e-9  # probability that a right block is called wrong
# Relative errors of float32 products by halves: of sums and products, and of the largest number of a row or column.
HALVES, COARSE = 2.0**-20, 2.0**-38


@lru_cache
def threshold(count: int) -> float:
    """Return t: right products exceed it with probability `FALSE_ALARM`, by the root mean square of `count` ratios."""
    goal, low, high = -2 * math.log(FALSE_ALARM) / count, 1.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle - 1 - math.log(middle) < goal else (low, middle)
    return math.sqrt(high)


def level(
    tolerance: Tolerance, sample: Sample, position: int, block: Block, alpha: complex = 1, beta: complex = 0,
    added: np.ndarray | None = None,
) -> tuple[float, int]:  # fmt: skip
    """Compare the sampled elements of a block of C with their float64 sums.

    `position` is that of the block among the blocks of `sample`, and `added` the block of C0, in host memory. Returns
    the root mean square of the ratios, divided by `threshold`, and the row of the largest ratio. If the first is above
    1, the errors are larger than the precision allows.
    """
    at, keep = np.unique(sample.columns[position], return_index=True)
    own = position * EDGE + keep
    given = lines(block, sample.rows, at).astype(tolerance.work)
    mine = {name: figure[..., own] for name, figure in sample.figures.items()}
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        whole = mine["sums"]
        product = whole[0] if len(whole) == 1 else (whole[0] - whole[1]) + 1j * (whole[2] + whole[3])
        factor = np.abs(np.complex128(alpha))  # its square may be infinite; Python's numbers would raise OverflowError
        truth, size = alpha * product, factor * abs(whole).sum(axis=0)
        if added is not None:
            before = beta * lines(added, sample.rows, at).astype(tolerance.work)
            truth, size = truth + before, size + abs(before)
        # Complex products by three real products first add real and imaginary parts, which doubles the sums.
        walk = mine["squares"].sum(axis=0) * (1 if len(whole) == 1 else 4)
        walk *= (tolerance.u * sample.dependence[position]) ** 2
        halves = HALVES**2 * ((whole**2).sum(axis=0) + mine["terms"] + mine["groups"]) + COARSE**2 * mine["coarse"]
        rounding = (tolerance.u_out * abs(truth)) ** 2 + (4 * tolerance.u * size) ** 2
        limit = np.sqrt(factor**2 * (walk + halves) + rounding)
        if tolerance.cuts:
            sure = CUT_OFF * (mine["cut"] + np.sqrt(sample.groups * mine["terms"]))
        else:
            sure = 2 * tolerance.u_in * mine["spread"]
        sure = factor * sure + tolerance.underflow(alpha)
        error = np.maximum(abs(truth - given) - sure, 0)
        counts = np.isfinite(truth) & np.isfinite(given) & np.isfinite(limit) & (abs(truth) + sure < tolerance.most / 2)
        ratio = np.where(counts & (error > 0), error / limit, 0.0)
    number = len(np.unique(truth[counts & (mine["terms"] > 0)]))
    row = int(sample.rows[np.argmax(ratio.max(axis=1, initial=0.0))])
    return math.sqrt((ratio**2).sum() / max(1, counts.sum())) / threshold(max(1, number)), row

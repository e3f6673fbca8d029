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
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from distmm.checking.tolerance import CUT_OFF, STRETCH, Tolerance
from distmm.worker import gpu

__all__ = [
    "EDGE",
    "FALSE_ALARM",
    "Columns",
    "Sample",
    "columns_of",
    "dependence",
    "level",
    "positions",
    "sampled",
    "threshold",
]

# Rows and columns of a block that cross in the sampled elements.
EDGE = 8

# Probability that a right block is taken for a wrong one.
FALSE_ALARM = 1e-9

# Products that are added at once here: partial sums are known at each sixteenth. Tensor cores add as many.
GROUP = 16

# What float32 products of halves may lose beside L: of sums and products; of the largest number of a row or column.
HALVES, COARSE = 2.0**-20, 2.0**-38

# What float64 numbers are multiplied by before a chain of float32 sums them: it has no short binary form.
ODD = math.log(2)

Block = Any  # a NumPy or CuPy array


@dataclass(frozen=True)
class Columns:
    """Some columns of a block of B.

    Attributes
    ----------
    at : array of int, shape (c,)
        Where they are in the block.
    values : array of shape (k, c)
        In the type of the block, in host memory.
    """

    at: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Sample:
    """Sums of products of sampled rows of A and columns of B, over the panels so far.

    float64 is divided by powers of two, and multiplied by `ODD`.

    Complex numbers have four real products (re re, im im, re im, im re), which some kernels sum one by one; the first
    axis counts them. The others are rows, and the columns of all blocks.

    Attributes
    ----------
    rows, columns : arrays of int
        Where they are in their blocks; `columns` has shape (blocks, c).
    shifts : pair of arrays of int, or None
        Exponents of these powers, of rows and columns.
    sums : array of shape (parts, rows, columns)
    squares : array
        Sums of squares of the partial sums, in ascending k or by lanes.
    totals : array
        Sums of each sixteenth partial sum.
    lanes : array of shape (parts, GROUP, rows, columns)
        Sums of each sixteenth product.
    terms, groups, spread : arrays
        Sums of the products' squares, of squared sums of 16 products, and of absolute products.
    cut : array
        Sum of absolute values of each sixteenth partial sum.
    coarse : array
        Squares of the largest number of a row or column times the others.
    sixteenths : int
        Partial sums that `totals` and `cut` have.
    chain : array of float32, shape (parts, pairs, blocks)
        The sums of some elements by a chain of float32: row p and column p of each block.
    """

    rows: np.ndarray
    columns: np.ndarray
    shifts: tuple[np.ndarray, np.ndarray] | None
    sums: np.ndarray
    squares: np.ndarray
    totals: np.ndarray
    lanes: np.ndarray
    terms: np.ndarray
    groups: np.ndarray
    spread: np.ndarray
    cut: np.ndarray
    coarse: np.ndarray
    sixteenths: int
    chain: np.ndarray


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind in "fcV"


def _is_wide(dtype: np.dtype) -> bool:
    return dtype.itemsize // (2 if dtype.kind == "c" else 1) > 4


def positions(size: int, *seed: int) -> np.ndarray:
    """Return `EDGE` different positions below `size`, or all, in ascending order."""
    return np.sort(np.random.default_rng(seed).choice(size, min(size, EDGE), replace=False))


def columns_of(block: Block, *seed: int) -> Columns | None:
    """Sample columns of a block of B; None where it has integers."""
    if not _is_float(block.dtype) or not block.size:
        return None
    at = positions(block.shape[1], *seed)
    return Columns(at, _lines(block.T, at).T)


def _lines(block: Block, at: np.ndarray, columns: np.ndarray | None = None) -> np.ndarray:
    """Return some rows of a block, or the elements where they cross some columns, in host memory.

    They are moved as integers: CuPy has all operations for those, and takes no subnormal number for zero.
    """
    moved = block.view(f"u{block.dtype.itemsize}") if block.dtype.itemsize <= 8 else block
    xp = gpu.namespace(block)
    if xp is np:
        lines = moved[at] if columns is None else moved[np.ix_(at, columns)]
        return np.asarray(lines.view(block.dtype))

    def on_gpu() -> np.ndarray:
        with gpu.working("product"):
            # One row after the other: an index of several rows may copy all of a transposed block.
            lines = xp.stack([moved[row] for row in at.tolist()])
            if columns is not None:
                lines = xp.stack([lines[:, column] for column in columns.tolist()], axis=1)
            return np.asarray(lines.get())

    return gpu.retrying(on_gpu, f"rows of a block, {block.shape[0]} x {block.shape[1]} {block.dtype},").view(
        block.dtype
    )


def sampled(before: Sample | None, block: Block, right: list[Columns], *seed: int) -> Sample | None:
    """Add the products of some rows of a block of A ``(m, k)`` and columns of a panel of B to the sums so far.

    Parameters
    ----------
    before : Sample or None
        None in the first panel.
    block : NumPy or CuPy array
    right : list of Columns
        Of all blocks of the panel.
    seed : int
        Of the choice of rows, in the first panel.
    """
    if not block.size or not _is_float(block.dtype):
        return None
    # The blocks of a ragged last column may have fewer columns; it is repeated, and compared once.
    at = np.stack([np.resize(one.at, EDGE) for one in right])
    values = np.concatenate([one.values[:, np.resize(np.arange(len(one.at)), EDGE)] for one in right], axis=1)
    rows = positions(block.shape[0], *seed) if before is None else before.rows
    a, b = _lines(block, rows), values.T
    shifts = (_exponents(a), _exponents(b)) if _is_wide(a.dtype) or _is_wide(b.dtype) else None
    if before is not None:
        shifts = before.shifts
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        pairs = _real_pairs(a, b)
        if shifts is not None:
            pairs = [(ODD * np.ldexp(x, -shifts[0]), np.ldexp(y, -shifts[1])) for x, y in pairs]
        parts = [_panel(x, y, len(right)) for x, y in pairs]
        stacked = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
        products = stacked.pop("products")
        return _added(before, rows, at, shifts, stacked, products, block.shape[1])


def _exponents(lines: np.ndarray) -> np.ndarray:
    """Exponents ``(lines, 1)`` of the largest number of each line."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.frexp(abs(lines).max(axis=1, keepdims=True))[1])


def _real_pairs(a: np.ndarray, b: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    if a.dtype.kind != "c" and b.dtype.kind != "c":
        return [(a.astype(np.float64), b.astype(np.float64))]
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    return [(a.real, b.real), (a.imag, b.imag), (a.real, b.imag), (a.imag, b.real)]


def _panel(a: np.ndarray, b: np.ndarray, blocks: int) -> dict[str, np.ndarray]:
    """Return the sums of a panel for real rows ``(r, k)`` of A and columns ``(c, k)`` of B, by groups of 16 steps."""
    k = a.shape[1]
    padded = -k % GROUP
    left, right = (np.pad(x, ((0, 0), (0, padded))).reshape(len(x), -1, GROUP) for x in (a, b))
    pairs = min(len(a), EDGE)
    by_block = b.reshape(blocks, EDGE, k)[:, :pairs]
    return {
        "within": left.transpose(1, 0, 2) @ right.transpose(1, 2, 0),
        "lanes": left.transpose(2, 0, 1) @ right.transpose(2, 1, 0),
        "terms": (a * a) @ (b * b).T,
        "spread": abs(a) @ abs(b).T,
        "coarse": np.outer((a * a).max(axis=1), (b * b).sum(axis=1)) + np.outer((a * a).sum(1), (b * b).max(1)),
        "products": (a[:pairs] * by_block).transpose(1, 0, 2).astype(np.float32),
    }


def _added(
    before: Sample | None,
    rows: np.ndarray,
    at: np.ndarray,
    shifts: tuple[np.ndarray, np.ndarray] | None,
    new: dict[str, np.ndarray],
    products: np.ndarray,
    k: int,
) -> Sample:
    within = new["within"]  # (parts, groups, rows, columns)
    zero = np.zeros_like(new["terms"])
    start = zero if before is None else before.sums
    sums = start[:, None] + within.cumsum(axis=1)
    earlier = np.concatenate([start[:, None], sums[:, :-1]], axis=1)
    lanes = new["lanes"] if before is None else before.lanes + new["lanes"]
    most = np.maximum(abs(lanes), 0 if before is None else abs(before.lanes))
    by_order = GROUP / 2 * (earlier**2 + sums**2).sum(axis=1) + GROUP * new["terms"]
    squares = np.maximum(by_order, _by_lanes(lanes, most, k))
    # Tensor cores leave their sum after a stretch, and begin the next one with nothing.
    begun = np.repeat(earlier[:, :: STRETCH // GROUP], STRETCH // GROUP, axis=1)[:, : sums.shape[1]]
    stretch = np.maximum(abs(sums), abs(sums - begun)).sum(axis=1)
    carried = np.zeros((*products.shape[:3], 1), np.float32) if before is None else before.chain[..., None]
    chain = np.add.accumulate(np.concatenate([carried, products], axis=3), axis=3)[..., -1]
    made = Sample(
        rows, at, shifts, sums[:, -1], squares, sums.sum(axis=1), lanes, new["terms"], (within**2).sum(axis=1),
        new["spread"], stretch, new["coarse"], within.shape[1], chain,
    )  # fmt: skip
    if before is None:
        return made
    summed = {
        name: getattr(before, name) + getattr(made, name)
        for name in ("squares", "totals", "terms", "groups", "spread", "cut", "coarse", "sixteenths")
    }
    return Sample(rows, at, shifts, made.sums, lanes=lanes, chain=chain, **summed)


def _by_lanes(lanes: np.ndarray, most: np.ndarray, k: int) -> np.ndarray:
    """Bound the squares of partial sums of kernels that add each w-th product by itself, w = 2, 4, 8, 16."""
    worst = k / GROUP * (most**2).sum(axis=1)
    for width in (2, 4, 8):
        folded = lanes.reshape(lanes.shape[0], GROUP // width, width, *lanes.shape[2:]).sum(axis=1)
        worst = np.maximum(worst, k / width * (folded**2).sum(axis=1))
    return np.asarray(worst)


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
    given = _lines(block, sample.rows, at).astype(tolerance.work)
    names = "terms", "groups", "spread", "cut", "coarse"
    mine = {name: getattr(sample, name)[..., own].sum(axis=0) for name in names}
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        whole = sample.sums[..., own]
        product = whole[0] if len(whole) == 1 else (whole[0] - whole[1]) + 1j * (whole[2] + whole[3])
        truth, size = alpha * product, abs(alpha) * abs(whole).sum(axis=0)
        if added is not None:
            before = beta * _lines(added, sample.rows, at).astype(tolerance.work)
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

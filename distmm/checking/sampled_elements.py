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

*The figures* of partial sums come from the elements of a few rows of A and a few columns of B, panel by panel
(`sampled`): in ascending and in descending k, in lanes (each w-th product), in groups of 16, and in a plain float32
chain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from distmm.checking.scaling import Block
from distmm.checking.thin_products import computed
from distmm.worker import gpu
from distmm_kernels.tolerance import CUT_OFF, STRETCH, Tolerance

EDGE = 8  # number of sampled rows, and of sampled columns, of a block
GROUP = 16  # products between two partial sums that are known; an instruction of tensor cores adds as many products

# Factor of float64 numbers before a float32 chain sums them. It has many binary digits, so that the chain rounds.
ODD = math.log(2)

FALSE_ALARM = 1e-9  # probability that a right block is called wrong
# Relative errors of float32 products by halves: of sums and products, and of the largest number of a row or column.
HALVES, COARSE = 2.0**-20, 2.0**-38


@dataclass(frozen=True)
class Columns:
    """Sampled columns of a block of B: their numbers, and their values ``(k, c)`` in the block's type, on the host."""

    at: np.ndarray
    values: np.ndarray


Part = dict[str, np.ndarray]  # the figures of one real product, which `Sample` explains


@dataclass(frozen=True)
class Sample:
    """Sums of products of sampled rows of A and sampled columns of B, over the panels so far.

    float64 rows and columns are first divided by powers of two, and multiplied by `ODD`. Real numbers have one part.
    Complex numbers have four (re re, im im, re im, im re), because some kernels sum these separately. The figures of a
    part have the shape (rows, columns), with the columns of all blocks of the panel. They are sums over k of

    - the products (sums), their squares (terms) and absolute values (spread);
    - the squares of the partial sums, in ascending k or by lanes, whichever are larger (squares);
    - the partial sums after each group (totals), and the squares of the groups' sums (groups);
    - the absolute partial sums after each group, as tensor cores have them (cut);
    - the squares of the largest number of a row (column) times the numbers of the column (row) (coarse);
    - each sixteenth product (lanes, of shape (GROUP, rows, columns));
    - the products of sampled row p and sampled column p of each block by a float32 chain (chain: (pairs, blocks)).
    """

    rows: np.ndarray  # their numbers in the block
    columns: np.ndarray  # their numbers in the blocks, (blocks, c)
    shifts: tuple[np.ndarray, np.ndarray] | None  # exponents of the divisors of rows and columns
    groups: int  # number of groups so far
    parts: tuple[Part, ...]

    @cached_property
    def figures(self) -> Part:
        """The figures that tell the error of elements, for all blocks of a row of C.

        These are the sums and the sums of squares of the partial sums, in the worse of ascending and descending order,
        of each part, and other figures of all parts together.
        """
        names = "sums", "totals", "squares", "terms", "groups", "spread", "cut", "coarse"
        with np.errstate(invalid="ignore", over="ignore"):
            sums, totals, squares, *others = (np.stack([part[name] for part in self.parts]) for name in names)
            left = GROUP * sums * (self.groups * sums - 2 * totals)
            squares = np.maximum(squares, squares + left)
            together = {name: one.sum(axis=0) for name, one in zip(names[3:], others, strict=True)}
        return {"sums": sums, "squares": squares, **together}

    @cached_property
    def dependence(self) -> np.ndarray:
        """The factors of L of the blocks, for dependent roundings. They are 1 for most data."""
        chain = np.stack([part["chain"] for part in self.parts])
        pairs = np.arange(chain.shape[1])[:, None]
        at = slice(None), pairs, pairs + EDGE * np.arange(chain.shape[2])
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            error = chain - self.figures["sums"][at]
            bound = 2.0**-48 * self.figures["squares"][at]  # u of float32 is 2^-24
            ratio = error**2 / bound
        known = np.isfinite(error) & np.isfinite(bound) & (bound > 0)
        mean = np.where(known, ratio, 0.0).sum(axis=(0, 1)) / np.maximum(1, known.sum(axis=(0, 1)))
        return np.asarray(np.maximum(1.0, 2 * np.sqrt(mean)))


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind in "fcV"


def _is_wide(dtype: np.dtype) -> bool:
    return dtype.itemsize // (2 if dtype.kind == "c" else 1) > 4


def positions(size: int, *seed: int) -> np.ndarray:
    """Return `EDGE` different random positions below `size` in ascending order; all if there are fewer."""
    return np.sort(np.random.default_rng(seed).choice(size, min(size, EDGE), replace=False))


def columns_of(block: Block, *seed: int) -> Columns | None:
    """Sample columns of a block of B. None for integers and for empty blocks."""
    if not _is_float(block.dtype) or not block.size:
        return None
    at = positions(block.shape[1], *seed)
    return Columns(at, lines(block.T, at).T)


def lines(block: Block, at: np.ndarray, columns: np.ndarray | None = None) -> np.ndarray:
    """Return rows `at` of a block, or only their elements in `columns`, in host memory.

    They are copied as integers: CuPy has all operations for these, and flushes no subnormal numbers to zero.
    """
    moved = block.view(f"u{block.dtype.itemsize}") if block.dtype.itemsize <= 8 else block
    # One row at a time: an index of several rows may copy a whole transposed block.
    found = np.stack(computed(block, lambda _: tuple(moved[row] for row in at.tolist())))
    return gpu.numbers((found if columns is None else found[:, columns]).view(block.dtype))


def sampled(before: Sample | None, block: Block, right: list[Columns | None], *seed: int) -> Sample | None:
    """Add the products of sampled rows of a block of A and sampled columns of a panel of B to the sums so far.

    `right` has the columns of each block of the panel, and `seed` chooses the rows in the first panel. None for
    integers and for empty blocks.
    """
    columns = [one for one in right if one is not None]
    if not block.size or not _is_float(block.dtype) or len(columns) < len(right):
        return None
    # A ragged last block may have fewer columns than `EDGE`. They are repeated here, and compared only once.
    at = np.stack([np.resize(one.at, EDGE) for one in columns])
    values = np.concatenate([one.values[:, np.resize(np.arange(len(one.at)), EDGE)] for one in columns], axis=1)
    rows = positions(block.shape[0], *seed) if before is None else before.rows
    a, b = lines(block, rows), values.T
    wide = _is_wide(a.dtype) or _is_wide(b.dtype)
    shifts = before.shifts if before is not None else (_exponents(a), _exponents(b)) if wide else None
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        pairs = _real_pairs(a, b)
        if shifts is not None:
            pairs = [(ODD * np.ldexp(x, -shifts[0]), np.ldexp(y, -shifts[1])) for x, y in pairs]
        earlier = [None] * len(pairs) if before is None else before.parts
        parts = tuple(_added(part, *pair, len(right)) for part, pair in zip(earlier, pairs, strict=True))
    groups = -(-block.shape[1] // GROUP) + (0 if before is None else before.groups)
    return Sample(rows, at, shifts, groups, parts)


def _exponents(lines: np.ndarray) -> np.ndarray:
    """Return the exponents ``(lines, 1)`` of the largest number of each line."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.frexp(abs(lines).max(axis=1, keepdims=True))[1])


def _real_pairs(a: np.ndarray, b: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the factors of the real products: one pair of real numbers, or the four pairs of complex numbers."""
    if a.dtype.kind != "c" and b.dtype.kind != "c":
        return [(a.astype(np.float64), b.astype(np.float64))]
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    return [(a.real, b.real), (a.imag, b.imag), (a.real, b.imag), (a.imag, b.real)]


def _added(before: Part | None, a: np.ndarray, b: np.ndarray, blocks: int) -> Part:
    """Add the products of one panel, for real rows ``(r, k)`` of A and columns ``(c, k)`` of B, to those before."""
    k, pairs = a.shape[1], min(len(a), EDGE)
    left, right = (np.pad(x, ((0, 0), (0, -k % GROUP))).reshape(len(x), -1, GROUP) for x in (a, b))
    within = left.transpose(1, 0, 2) @ right.transpose(1, 2, 0)  # (groups, rows, columns)
    lanes = left.transpose(2, 0, 1) @ right.transpose(2, 1, 0)
    terms = (a * a) @ (b * b).T
    products = (a[:pairs] * b.reshape(blocks, EDGE, k)[:, :pairs]).transpose(1, 0, 2).astype(np.float32)
    if before is None:
        before = {"sums": np.zeros_like(terms), "lanes": np.zeros_like(lanes), "chain": np.zeros_like(products[..., 0])}
    sums = before["sums"] + within.cumsum(axis=0)
    earlier = np.concatenate([before["sums"][None], sums[:-1]])
    lanes = lanes + before["lanes"]
    # After `STRETCH` steps, tensor cores restart from zero. Their sum is added to the total in float32.
    begun = np.repeat(earlier[:: STRETCH // GROUP], STRETCH // GROUP, axis=0)[: len(sums)]
    in_order = GROUP / 2 * (earlier**2 + sums**2).sum(axis=0) + GROUP * terms
    new = {
        "squares": np.maximum(in_order, _by_lanes(lanes, np.maximum(abs(lanes), abs(before["lanes"])), k)),
        "totals": sums.sum(axis=0),
        "terms": terms,
        "groups": (within**2).sum(axis=0),
        "spread": abs(a) @ abs(b).T,
        "cut": np.maximum(abs(sums), abs(sums - begun)).sum(axis=0),
        "coarse": np.outer((a * a).max(axis=1), (b * b).sum(axis=1)) + np.outer((a * a).sum(1), (b * b).max(1)),
    }
    chain = np.add.accumulate(np.concatenate([before["chain"][..., None], products], axis=2), axis=2)[..., -1]
    whole = {name: figure + before.get(name, 0) for name, figure in new.items()}
    return {**whole, "sums": sums[-1], "lanes": lanes, "chain": chain}


def _by_lanes(lanes: np.ndarray, most: np.ndarray, k: int) -> np.ndarray:
    """Bound the squared partial sums of kernels that sum each w-th product separately, for w = 2, 4, 8, 16."""
    worst = k / GROUP * (most**2).sum(axis=0)
    for width in (2, 4, 8):
        folded = lanes.reshape(-1, width, *lanes.shape[1:]).sum(axis=0)
        worst = np.maximum(worst, k / width * (folded**2).sum(axis=0))
    return np.asarray(worst)


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
        truth, size = alpha * product, abs(alpha) * abs(whole).sum(axis=0)
        if added is not None:
            before = beta * lines(added, sample.rows, at).astype(tolerance.work)
            truth, size = truth + before, size + abs(before)
        # Complex products by three real products first add real and imaginary parts, which doubles the sums.
        walk = mine["squares"].sum(axis=0) * (1 if len(whole) == 1 else 4)
        walk *= (tolerance.u * sample.dependence[position]) ** 2
        halves = HALVES**2 * ((whole**2).sum(axis=0) + mine["terms"] + mine["groups"]) + COARSE**2 * mine["coarse"]
        rounding = (tolerance.u_out * abs(truth)) ** 2 + (4 * tolerance.u * size) ** 2
        limit = np.sqrt(abs(alpha) ** 2 * (walk + halves) + rounding)
        if tolerance.cuts:
            sure = CUT_OFF * (mine["cut"] + np.sqrt(sample.groups * mine["terms"]))
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

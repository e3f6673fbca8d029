"""Samples of C: the elements of a few rows of A and a few columns of B, summed again in float64, panel by panel.

The figures that `distmm.checking.sampled_errors` needs are summed with them: in ascending and in descending k, in lanes
(each w-th product), in groups of 16, and in a plain float32 chain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distmm.checking.scaling import Block
from distmm.checking.thin_products import computed
from distmm.worker import gpu
from distmm_kernels.tolerance import STRETCH

EDGE = 8  # number of sampled rows, and of sampled columns, of a block
GROUP = 16  # products between two partial sums that are known; an instruction of tensor cores adds as many products

# Factor of float64 numbers before a float32 chain sums them. It has many binary digits, so that the chain rounds.
ODD = math.log(2)


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

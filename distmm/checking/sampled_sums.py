"""Sums of sampled elements of C in float64, panel by panel: the elements of a few rows of A and a few columns of B.

`distmm.checking.sampled_elements` bounds the error of these elements in a block of C. It needs figures of their partial
sums: in ascending and in descending k, in lanes (each w-th product), in groups of 16, and in a plain float32 chain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm.checking.tolerance import STRETCH
from distmm.worker import gpu

__all__ = ["EDGE", "GROUP", "Columns", "Sample", "columns_of", "lines", "positions", "sampled"]

# Number of sampled rows, and of sampled columns, of a block.
EDGE = 8

# Products in a group. Partial sums are known after each group. An instruction of tensor cores adds as many products.
GROUP = 16

# Factor of float64 numbers before a float32 chain sums them. It has no short binary form, so that products get many
# binary digits, and the chain rounds.
ODD = math.log(2)

Block = Any  # a NumPy or CuPy array


@dataclass(frozen=True)
class Columns:
    """Sampled columns of a block of B.

    Attributes
    ----------
    at : array of int, shape (c,)
        Column numbers in the block.
    values : array of shape (k, c)
        In the type of the block, in host memory.
    """

    at: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Sample:
    """Sums of products of sampled rows of A and sampled columns of B, over the panels so far.

    float64 rows and columns are first divided by powers of two, and multiplied by `ODD`.

    Arrays have shape (parts, rows, columns), where nothing else is said. Real numbers have one part. Complex numbers
    have four real products (re re, im im, re im, im re) as parts, because some kernels sum these separately. `columns`
    counts the sampled columns of all blocks of the panel.

    Attributes
    ----------
    rows, columns : arrays of int
        Row and column numbers in their blocks, of shapes (rows,) and (blocks, c).
    shifts : pair of arrays of int, or None
        Exponents of the powers of two that rows and columns are divided by.
    sums : array
        The elements so far.
    squares : array
        Sums of squares of the partial sums, in ascending k or by lanes, whichever is larger.
    totals : array
        Sums of the partial sums after each group.
    lanes : array of shape (parts, GROUP, rows, columns)
        Sums of each sixteenth product.
    terms, groups, spread : arrays
        Sums of the squares of the products, of the squares of the groups' sums, and of the absolute products.
    cut : array
        Sums of the absolute partial sums after each group, as tensor cores have them.
    coarse : array
        Sums of the squares of the largest number of a row (column) times the numbers of the column (row).
    sixteenths : int
        Number of groups in `totals` and `cut`.
    chain : array of float32, shape (parts, pairs, blocks)
        Elements summed by a float32 chain: those of sampled row p and sampled column p of each block.
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

    They are copied as integers. CuPy has all operations for integers, and does not flush their subnormal numbers to
    zero.
    """
    moved = block.view(f"u{block.dtype.itemsize}") if block.dtype.itemsize <= 8 else block
    xp = gpu.namespace(block)
    if xp is np:
        found = moved[at] if columns is None else moved[np.ix_(at, columns)]
        return np.asarray(found.view(block.dtype))

    def on_gpu() -> np.ndarray:
        with gpu.working("product"):
            # One row at a time: an index of several rows may copy a whole transposed block.
            found = xp.stack([moved[row] for row in at.tolist()])
            if columns is not None:
                found = xp.stack([found[:, column] for column in columns.tolist()], axis=1)
            return np.asarray(found.get())

    return gpu.retrying(on_gpu, f"rows of a block, {block.shape[0]} x {block.shape[1]} {block.dtype},").view(
        block.dtype
    )


def sampled(before: Sample | None, block: Block, right: list[Columns], *seed: int) -> Sample | None:
    """Add the products of sampled rows of a block of A and sampled columns of a panel of B to the sums so far.

    Parameters
    ----------
    before : Sample or None
        The sums over the panels before. None in the first panel.
    block : NumPy or CuPy array of shape (m, k)
    right : list of Columns
        The sampled columns of each block of the panel.
    *seed : int
        Seed of the choice of rows, in the first panel.

    Returns
    -------
    Sample or None
        None for integers and for empty blocks.
    """
    if not block.size or not _is_float(block.dtype):
        return None
    # A ragged last block may have fewer columns than `EDGE`. They are repeated here, and compared only once.
    at = np.stack([np.resize(one.at, EDGE) for one in right])
    values = np.concatenate([one.values[:, np.resize(np.arange(len(one.at)), EDGE)] for one in right], axis=1)
    rows = positions(block.shape[0], *seed) if before is None else before.rows
    a, b = lines(block, rows), values.T
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
    """Return the exponents ``(lines, 1)`` of the largest number of each line."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.frexp(abs(lines).max(axis=1, keepdims=True))[1])


def _real_pairs(a: np.ndarray, b: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the factors of the real products: one pair of real numbers, or the four pairs of complex numbers."""
    if a.dtype.kind != "c" and b.dtype.kind != "c":
        return [(a.astype(np.float64), b.astype(np.float64))]
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    return [(a.real, b.real), (a.imag, b.imag), (a.real, b.imag), (a.imag, b.real)]


def _panel(a: np.ndarray, b: np.ndarray, blocks: int) -> dict[str, np.ndarray]:
    """Return the sums over one panel for real rows ``(r, k)`` of A and columns ``(c, k)`` of B, by groups."""
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
    """Add the sums of one panel (`_panel`) to those of the panels before."""
    within = new["within"]  # (parts, groups, rows, columns)
    zero = np.zeros_like(new["terms"])
    start = zero if before is None else before.sums
    sums = start[:, None] + within.cumsum(axis=1)
    earlier = np.concatenate([start[:, None], sums[:, :-1]], axis=1)
    lanes = new["lanes"] if before is None else before.lanes + new["lanes"]
    most = np.maximum(abs(lanes), 0 if before is None else abs(before.lanes))
    by_order = GROUP / 2 * (earlier**2 + sums**2).sum(axis=1) + GROUP * new["terms"]
    squares = np.maximum(by_order, _by_lanes(lanes, most, k))
    # After `STRETCH` steps, tensor cores restart from zero. Their sum is added to the total in float32.
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
    """Bound the squared partial sums of kernels that sum each w-th product separately, for w = 2, 4, 8, 16."""
    worst = k / GROUP * (most**2).sum(axis=1)
    for width in (2, 4, 8):
        folded = lanes.reshape(lanes.shape[0], GROUP // width, width, *lanes.shape[2:]).sum(axis=1)
        worst = np.maximum(worst, k / width * (folded**2).sum(axis=1))
    return np.asarray(worst)

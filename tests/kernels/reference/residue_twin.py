"""A NumPy model of the kernel ``residues``, with the same bits: float64 products by residues. It needs no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmm_kernels.emulation.formats import GRANULE, Guard
from distmm_kernels.emulation.moduli import LIMIT, MODULI, OFFSET, PRODUCT, UNITS, WEIGHTS, digits
from distmm_kernels.emulation.residues import LARGEST_SQUARES, LEAST_SQUARES, SHORTEST, STRETCH, nearest, smallest
from distmm_kernels.emulation.sparsity import Counts, counts
from tests.kernels.reference.exact import two_product, two_sum
from tests.kernels.reference.twins import guards_of, words

__all__ = ["fma_chain", "product", "reconstruct", "row_counts", "scaled", "split", "squares"]

Float64 = NDArray[np.float64]


def squares(x: Float64) -> Float64:
    """Sum the squares of rows ``(rows, k)`` of one granule, in the order of the device.

    The device adds 4 consecutive squares from left to right, the 32 such sums of `STRETCH` steps as a binary tree of
    adjacent pairs, and the sums of all `STRETCH` steps from left to right.
    """
    rows, k = x.shape
    stretches = max(1, -(-k // STRETCH))
    padded = np.zeros((rows, stretches * STRETCH))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        padded[:, :k] = x * x
        fours = padded.reshape(rows, stretches, STRETCH // 4, 4)
        sums = ((fours[..., 0] + fours[..., 1]) + fours[..., 2]) + fours[..., 3]
        while sums.shape[-1] > 1:
            sums = sums[..., ::2] + sums[..., 1::2]
        total = np.zeros(rows)
        for stretch in range(stretches):
            total = total + sums[:, stretch, 0]
    return total


def scaled(x: Float64) -> tuple[NDArray[np.int64], Float64, Guard]:
    """Scale rows ``(rows, k)`` of one granule to integers: ``x = integers * factor``, nearly.

    Returns
    -------
    integers, factor
        ``(rows, k)``, and a power of two ``(rows,)``. Not valid if a guard is raised.
    """
    sums, guard = squares(x), Guard(0)
    if not (sums <= LARGEST_SQUARES).all():
        guard |= Guard.OVERFLOW
    if ((sums > 0) & (sums < LEAST_SQUARES)).any():
        guard |= Guard.UNDERFLOW
    held = (sums >= LEAST_SQUARES) & (sums <= LARGEST_SQUARES)
    exponent = np.where(held, np.frexp(LIMIT / np.where(held, sums, 1.0))[1].astype(np.int64) - 1 >> 1, 0)
    with np.errstate(under="ignore"):
        integers = np.rint(np.where(held[:, None], x, 0) * np.ldexp(1.0, exponent)[:, None]).astype(np.int64)
    return integers, np.ldexp(1.0, -exponent), guard | guards_of(_words(x, integers), x.shape[1])


def _words(x: Float64, integers: NDArray[np.int64]) -> NDArray[np.uint32]:
    limits = smallest(x.shape[1]), nearest(x.shape[1])
    return words(np.where(x == 0, 0, np.maximum(np.abs(integers), 1)), *limits)


def row_counts(x: Float64) -> Counts:
    """Count the small and far numbers of rows ``(rows, k)`` of one granule."""
    return next(counts(_words(x, scaled(x)[0])[None, None], (x.shape[1],)))


def split(x: Float64) -> tuple[NDArray[np.int8], Float64, Guard]:
    """Return the residues ``(moduli, rows, k)`` of a granule, the factors of its rows, and the guard."""
    integers, factor, guard = scaled(x)
    residues = [((integers % p + OFFSET) % p - OFFSET).astype(np.int8) for p in MODULI]
    return np.stack(residues), factor, guard


def reconstruct(residues: NDArray[Any]) -> Float64:
    """Return the integers between -P/2 and P/2 that have these residues ``(moduli, ...)``, rounded to float64."""
    wide = residues.astype(np.int64)
    # each sum is an integer below 2^53: exact, as on the device
    high, middle, low = (
        sum(digits(weight)[i] * wide[j] for j, weight in enumerate(WEIGHTS)).astype(np.float64) for i in range(3)
    )
    quotient = np.rint(np.ldexp(high, UNITS[0]) * (1 / PRODUCT)).astype(np.int64)
    rest = [
        part.astype(np.int64) - digit * quotient
        for part, digit in zip((high, middle, low), digits(PRODUCT), strict=True)
    ]
    high, middle, low = (np.ldexp(part.astype(np.float64), unit) for part, unit in zip(rest, UNITS, strict=True))
    return np.asarray(high + (middle + low))


def product(a: Float64, b: Float64, c: Float64 | None = None) -> tuple[Float64, Guard]:
    """Return ``c + a @ b`` as the kernel computes it if no guard is raised, and the guards.

    The last granule is computed by a chain of multiply-adds if it has fewer than ``SHORTEST`` steps.
    """
    d, found = c, Guard(0)
    for first in range(0, a.shape[1], GRANULE):
        left, right = a[:, first : first + GRANULE], b[first : first + GRANULE]
        if left.shape[1] < SHORTEST:
            d = fma_chain(left, right, d)
            continue
        (x, rows, one), (y, columns, other) = split(left), split(np.ascontiguousarray(right.T))
        found |= one | other
        # the sums of int8 products are exact in float64, so BLAS computes them
        sums = np.matmul(x.astype(np.float64), y.astype(np.float64).swapaxes(1, 2)).astype(np.int64)
        moduli = np.array(MODULI)[:, None, None]
        added = reconstruct((sums + OFFSET) % moduli - OFFSET) * (rows[:, None] * columns)
        d = added if d is None else d + added
    return np.zeros((a.shape[0], b.shape[1])) if d is None else d, found


def fma_chain(a: Float64, b: Float64, c: Float64 | None = None) -> Float64:
    """Return ``c + a @ b`` by a chain of fused multiply-adds, as ``"ieee"`` does. Nearly all bits are the same."""
    d = np.zeros((a.shape[0], b.shape[1])) if c is None else c
    for k in range(a.shape[1]):
        product, rest = two_product(a[:, k, None], b[k])
        total, lost = two_sum(d, product)
        d = total + (lost + rest)
    return d

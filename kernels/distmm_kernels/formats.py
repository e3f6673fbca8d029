"""How float32 operands lie in memory for tensor cores: split into narrower parts, padded, k contiguous or not.

A tensor core multiplies numbers of 11 significant bits exactly. A float32 has 24, so it becomes a sum of two such numbers,
``x = scale * (hi + lo)``, and ``a b = hi hi + hi lo + lo hi`` up to ``lo lo``, 2^-22 of it or less (Ootomo & Yokota, IJHPCA
2022). In float16 the sum keeps 22 to 24 bits where the numbers of a row of A (a column of B) do not differ too much: each
is scaled by a power of two that brings its maximum to [2^14, 2^15). In TF32 it keeps 22 to 24 bits of any normal number.

The scale belongs to one row and `GRANULE` steps of k, counted from the operand's first: so an operand that is cut there has
the same parts as the whole. What a format cannot hold is a `Guard`, found while splitting, and raised for the granule.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["FP16_PAIR", "GRANULE", "TF32", "TF32_PAIR", "Format", "Guard", "Placement", "granules", "place", "warps_of"]

GRANULE = 8192  # a row of it is what the registers of one thread block hold; blocks of a matrix are rarely deeper

TOP = 14  # exponent that a row's maximum is scaled to: 2^15 - 1 is in the range of float16, 2^16 is not
LARGEST_EXPONENT = 60  # of a row's maximum in float16 parts: beyond it, scaling the product could leave float32's range
# A float16 has 10 bits behind its first one down to 2^-14; lo, 11 to 12 bits further down, must still have them. Smaller
# numbers keep fewer bits, down to the last float16, 2^-24.
SMALL_EXPONENT = -3
SHARE = 64  # a row may have one small number in so many that are not zero; N(0, 1) has one in 40,000
# A tensor core's float32 sums overflow and vanish like any other's: products of numbers within these bounds do neither.
TF32_LARGEST_EXPONENT = 64
TF32_SMALLEST_EXPONENT = -50

TMA_BYTES = 16  # alignment of rows that the tensor memory accelerator loads


class Guard(enum.IntFlag):
    """Why a granule of an operand cannot be held in a format."""

    OVERFLOW = 1  # infinite, not a number, or too large
    UNDERFLOW = 2  # a row's maximum too small to scale, or too many numbers whose products would vanish
    RANGE = 4  # too many numbers of a row small against its maximum


@dataclass(frozen=True)
class Format:
    """How one float32 is stored.

    Attributes
    ----------
    dtype
        Of each part.
    parts
        1 for the rounded number, 2 for hi and lo.
    scaled
        Whether parts are scaled by a power of two for each row and granule.
    guarded
        Whether numbers that the format cannot hold are looked for.
    """

    name: str
    dtype: np.dtype[Any]
    parts: int
    scaled: bool
    guarded: bool

    @property
    def multiple(self) -> int:
        """Elements that a padded row is a multiple of."""
        return TMA_BYTES // self.dtype.itemsize


FP16_PAIR = Format("fp16_pair", np.dtype("float16"), 2, scaled=True, guarded=True)
TF32_PAIR = Format("tf32_pair", np.dtype("float32"), 2, scaled=False, guarded=True)
TF32 = Format("tf32", np.dtype("float32"), 1, scaled=False, guarded=False)


@dataclass(frozen=True)
class Placement:
    """How a stack of matrices ``(batch, rows, k)`` may be read.

    Attributes
    ----------
    contiguous
        Axis of unit stride: ``"k"`` or ``"rows"``; None if neither has it, then it is copied first.
    aligned
        Whether four neighbours along that axis lie on 16 bytes, everywhere.
    """

    contiguous: str | None
    aligned: bool


def place(shape: tuple[int, ...], strides: tuple[int, ...], address: int, itemsize: int) -> Placement:
    """Say how a stack ``(batch, rows, k)`` may be read, from its strides in bytes and the address of its first element.

    An axis of one element may count as having any stride. k is preferred, since it needs no transposition.
    """
    _, rows, k = shape
    for axis, size, contiguous in ((2, k, "k"), (1, rows, "rows")):
        if strides[axis] == itemsize or size == 1:
            others = [address, *(strides[i] for i in range(3) if i != axis and shape[i] > 1)]
            return Placement(contiguous, all(number % TMA_BYTES == 0 for number in others))
    return Placement(None, aligned=False)


def granules(k: int) -> int:
    """Count the granules of an operand, the last one ragged."""
    return -(-k // GRANULE)


def warps_of(k: int) -> int:
    """Warps of a block that share a row, so that their registers hold a granule of it, or all of it if it is shorter."""
    return next(warps for warps in (1, 2, 4, 8) if warps * (GRANULE // 8) >= min(k, GRANULE))

"""Formats of float32 operands for tensor cores: which parts they are split into, and when that is accurate.

A tensor core multiplies numbers of 11 significant bits exactly. A float32 has 24, so it becomes a sum of two such
numbers, ``x = scale * (hi + lo)``. Then ``a b = hi hi + hi lo + lo hi``; ``lo lo``, at most 2^-22 of it, is left out
(Ootomo and Yokota, IJHPCA 2022). TF32 parts keep 22 to 24 bits of any number. float16 parts, which tensor cores
multiply twice as fast, keep as many where numbers do not differ too much within a row of A (a column of B): a power of
two scales the row's maximum to [2^14, 2^15), the largest range that float16 allows.

A scale belongs to one row and one granule, `GRANULE` steps of k counted from the operand's first. So an operand that is
cut there has the same parts as the whole. The split raises a `Guard` for each granule that a format cannot hold.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import uint32

__all__ = ["FP16_PAIR", "GRANULE", "TF32", "TF32_PAIR", "Format", "Guard", "granules", "tf32_bits", "warps_of"]

GRANULE = 8192  # the registers of one thread block hold a row of a granule; blocks of a matrix are rarely deeper

TOP = 14  # exponent that a row's maximum is scaled to: rounded up it is 2^15 at most, and 2^16 is no float16
LARGEST_EXPONENT = 60  # of a row's maximum, up and down: beyond it, scaling could leave float32's range
# float16 has its 10 bits behind the first one down to 2^-14, and lo, 11 or 12 bits below x, must still have them.
# Smaller numbers keep fewer bits, down to the last float16, 2^-24.
SMALL_EXPONENT = -3
NEAR_EXPONENT = 5  # larger numbers are near the row's largest: distmm_kernels.emulation.sparsity
SHARE = 64  # a row may have one small number for so many near ones; N(0, 1) has 1 for 40,000
# Products of TF32 numbers within these bounds neither overflow nor vanish, summed over any k.
TF32_LARGEST_EXPONENT = 56
TF32_SMALLEST_EXPONENT = -50


class Guard(enum.IntFlag):
    """Why a granule of an operand cannot be held in a format; `SPARSE`: why not with every other operand."""

    OVERFLOW = 1  # infinite, not a number, or too large
    UNDERFLOW = 2  # a row's maximum too small to scale, or too many numbers whose products would vanish
    RANGE = 4  # too many numbers of a row small against its maximum
    SPARSE = 8  # a row has few numbers near its maximum: whether the format is accurate depends on the other operand


@dataclass(frozen=True)
class Format:
    """How one float32 is stored.

    Attributes
    ----------
    dtype
        Of each part.
    parts
        1 for the rounded number, 2 for hi and lo.
    """

    name: str
    dtype: np.dtype[Any]
    parts: int

    @property
    def scaled(self) -> bool:
        """Whether each row and granule is scaled by a power of two: the range of float16 is too small without."""
        return self.dtype.itemsize == 2

    @property
    def guarded(self) -> bool:
        """Whether the split looks for numbers that the format cannot hold; a format of rounded numbers does not."""
        return self.parts == 2

    @property
    def along_k(self) -> bool:
        """Whether tensor cores want k contiguous."""
        return self.dtype.itemsize != 2


FP16_PAIR = Format("fp16_pair", np.dtype("float16"), 2)
TF32_PAIR = Format("tf32_pair", np.dtype("float32"), 2)
TF32 = Format("tf32", np.dtype("float32"), 1)


def granules(k: int) -> int:
    """Count the granules of an operand; the last one may be shorter."""
    return -(-k // GRANULE)


def warps_of(k: int) -> int:
    """Return how many warps share a row, so that their registers hold a granule of it, or all of it if that is less."""
    return next(warps for warps in (1, 2, 4, 8) if warps * (GRANULE // 8) >= min(k, GRANULE))


def tf32_bits(bits: Any) -> Any:
    """Round the bits of float32 numbers to TF32: to nearest, ties to even, as the tensor memory accelerator does.

    So a product has the same bits whether the accelerator rounds an operand or a copy of it was rounded before. NaN
    becomes a quiet one, since its bits beyond TF32's are not read. All integers are unsigned, of 32 bits, or arrays of
    them: kernels call this function too.
    """
    nan = uint32((bits & uint32(0x7FFFFFFF)) > uint32(0x7F800000))
    half = uint32(0xFFF) + (bits >> uint32(13) & uint32(1))
    return (bits + (uint32(1) - nan) * half | nan << uint32(22)) & uint32(0xFFFFE000)

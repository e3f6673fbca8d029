"""Formats of float32 operands for tensor cores: the parts of a number, and when they are accurate.

A tensor core multiplies numbers of 11 significant bits exactly. A float32 has 24, so it becomes a sum of two such
numbers, ``x = scale * (hi + lo)``. Then ``a b`` is nearly ``hi hi + hi lo + lo hi``. The term ``lo lo``, at most 2^-22
of ``a b``, is not computed (Ootomo and Yokota, IJHPCA 2022). TF32 parts keep 22 to 24 bits of any number. Tensor cores
multiply float16 parts twice as fast. These keep as many bits if the numbers of a row of A (a column of B) do not differ
too much in size. A power of two scales the row's maximum to [2^14, 2^15), the largest range that float16 allows.

Each row has one scale for each granule. A granule is `GRANULE` steps of k, counted from the operand's first step. So
the parts do not change if an operand is cut between granules. The split raises a `Guard` for each granule that a format
cannot represent.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

GRANULE = 8192  # one row of a granule fits in the registers of a thread block; k of a block is rarely larger

TOP = 14  # exponent of a row's scaled maximum: it rounds to 2^15 at most, and float16 overflows at 2^16
LARGEST_EXPONENT = 60  # the largest |exponent| of a row's maximum: scaling by more could leave float32's range
# float16 numbers from 2^-14 on are normal: they have 10 bits after the leading one. lo is 11 or 12 bits below x and
# must be normal, so x must be 2^-3 at least. Smaller numbers keep fewer bits. The smallest float16 is 2^-24.
SMALL_EXPONENT = -3
NEAR_EXPONENT = 5  # scaled numbers of at least 2^5 are near the row's largest: distmm_kernels.emulation.sparsity
SHARE = 64  # a row may have one small number for each 64 near ones; N(0, 1) has one for each 40,000
# Sums of products of TF32 numbers within these bounds neither overflow nor underflow, for any k.
TF32_LARGEST_EXPONENT = 56
TF32_SMALLEST_EXPONENT = -50
# hi has 11 bits and lo the next 11, which are multiples of 2^-136 at least: the smallest TF32 number. Smaller numbers
# than this keep fewer bits, whatever they are multiplied by, so that one of them is too many.
TF32_TINY_EXPONENT = -115


class Guard(enum.IntFlag):
    """Why a format cannot represent a granule of an operand. For `SPARSE` it depends on the other operand."""

    OVERFLOW = 1  # infinite, not a number, or too large
    UNDERFLOW = 2  # a row's maximum too small to scale, or too many numbers whose products would underflow
    RANGE = 4  # too many numbers of a row are small compared with its maximum
    SPARSE = 8  # few numbers of a row are near its maximum: the other operand decides whether the product is accurate


@dataclass(frozen=True)
class Format:
    """The parts that one float32 is stored as: hi and lo.

    Attributes
    ----------
    dtype
        Type of each part.
    """

    name: str
    dtype: np.dtype[Any]

    @property
    def scaled(self) -> bool:
        """Whether each row and granule is scaled by a power of two. float16 has too small a range without scaling."""
        return self.dtype.itemsize == 2


FP16_PAIR = Format("fp16_pair", np.dtype("float16"))
TF32_PAIR = Format("tf32_pair", np.dtype("float32"))


def granules(k: int) -> int:
    """Count the granules of an operand; the last one may be shorter."""
    return -(-k // GRANULE)


def warps_of(k: int) -> int:
    """Return how many warps share a row. Their registers hold a granule of it, or the whole row if that is shorter."""
    return next(warps for warps in (1, 2, 4, 8) if warps * (GRANULE // 8) >= min(k, GRANULE))

"""The choice of the kernel that copies an operand before a product. `distmm_kernels.layout.vectors` launches it."""

from __future__ import annotations

from distmm_kernels.launch.binary import Recipe
from distmm_kernels.layout.stack import Stack

TILE = 32  # rows and columns of the tile that a thread block transposes; in words of 4 bytes if elements are smaller
WARPS, CHUNK = 8, 128  # of `realign`: warps of a block, and words of 4 bytes that a warp loads before it waits

NUMBERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}  # type of a copied element, by itemsize


REALIGN = Recipe("distmm_kernels.device_code.copies.realign:source")


def choose(source: Stack) -> Recipe | None:
    """Return the kernel that copies matrices to rows of aligned vectors; None if CuPy copies them."""
    if source.contiguous(-1):  # rows that begin anywhere, shifted to whole vectors
        return REALIGN
    if abs(source.strides[-2]) < abs(source.strides[-1]):  # elements are closer together down the columns
        number = (NUMBERS[4], 4 // source.itemsize) if _by_words(source) else (NUMBERS[source.itemsize], 1)
        return Recipe("distmm_kernels.device_code.copies.transpose:source", number)
    return None  # neighbours are apart along both axes


def _by_words(source: Stack) -> bool:
    """Whether columns of 8-bit or 16-bit numbers are contiguous, and all begin and end at multiples of 4 bytes."""
    itemsize = source.itemsize
    others = (source.address, source.rows * itemsize, source.strides[-1], *source.strides[:-2])
    return source.strides[-2] == itemsize <= 2 and not any(number % 4 for number in others)

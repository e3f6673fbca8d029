"""The choice of the kernels that copy operands before a product: what each copies, and from which layout.

`distmm_kernels.layout.vectors` launches the kernels that keep the numbers. `distmm_kernels.emulation.splits` launches
those that split float32.
"""

from __future__ import annotations

from typing import NamedTuple

from distmm_kernels.emulation.formats import Format, warps_of
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.layout.stack import Stack

TILE = 32  # rows and columns of the tile that a thread block transposes; in words of 4 bytes if elements are smaller
WARPS, CHUNK = 8, 128  # of `realign`: warps of a block, and words of 4 bytes that a warp loads before it waits

NUMBERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}  # type of a copied element, by itemsize


class Copy(NamedTuple):
    """The copy that suits matrices and a format.

    Attributes
    ----------
    recipes
        The kernels, in the order of their launches. Empty if CuPy copies.
    block
        Rows and columns of the source that one thread block copies, if they are fixed.
    """

    name: str
    recipes: tuple[Recipe, ...] = ()
    block: tuple[int, int] = (0, 0)


def choose(source: Stack, form: Format | None = None) -> Copy:
    """Return the copy that suits matrices and a format. Without a format, the numbers are kept.

    Matrices to be split into a format are ``(rows, k)``: A, or B transposed.
    """
    along_rows, along_columns = source.contiguous(-1), source.contiguous(-2)
    if form is None:
        if along_rows:  # rows that begin anywhere, shifted to whole vectors
            return Copy("realign", (_recipe("realign:source"),))
        if abs(source.strides[-2]) < abs(source.strides[-1]):  # elements are closer together down the columns
            number = (NUMBERS[4], 4 // source.itemsize) if _by_words(source) else (NUMBERS[source.itemsize], 1)
            return Copy("transpose", (_recipe("transpose:source", *number),), (TILE, TILE))
    elif along_rows:  # a block holds a row's granule in registers and reads memory once
        return Copy("split_rows", (_recipe("split_rows", form, source.aligned(-1), warps_of(source.columns)),))
    elif form.scaled and along_columns:  # rows stay contiguous: maxima first, then the split
        aligned = source.aligned(-2)
        return Copy(
            "split_columns", (_recipe("find_maxima", aligned), _recipe("split_columns", form, aligned)), (128, 128)
        )
    elif along_columns:  # k contiguous in the result, through a tile in shared memory
        return Copy("split_transposed", (_recipe("split_transposed", form),), (32, 128))
    return Copy("strided")  # neighbours are apart along both axes


def _recipe(maker: str, *parameters: object) -> Recipe:
    file = maker if ":" in maker else f"prepass:{maker}"
    return Recipe(f"distmm_kernels.device_code.copies.{file}", parameters)


def _by_words(source: Stack) -> bool:
    """Whether columns of 8-bit or 16-bit numbers are contiguous, and all begin and end at multiples of 4 bytes."""
    itemsize = source.itemsize
    others = (source.address, source.rows * itemsize, source.strides[-1], *source.strides[:-2])
    return source.strides[-2] == itemsize <= 2 and not any(number % 4 for number in others)

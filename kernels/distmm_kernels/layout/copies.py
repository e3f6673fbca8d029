"""The table of the kernels that copy operands before a product: what each copies, and from which layout.

`distmm_kernels.layout.vectors` launches the kernels that keep the numbers. `distmm_kernels.emulation.splits` launches
those that split float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from distmm_kernels.emulation.formats import Format, warps_of
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.layout.stack import Stack

TILE = 32  # rows and columns of the tile that a thread block transposes; in words of 4 bytes if elements are smaller
WARPS, CHUNK = 8, 128  # of `realign`: warps of a block, and words of 4 bytes that a warp loads before it waits

NUMBERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}  # type of a copied element, by itemsize


class Request(NamedTuple):
    """What is to be copied: matrices, and the format of the result. Without a format, the numbers are kept.

    Matrices to be split into a format are ``(rows, k)``: A, or B transposed.
    """

    source: Stack
    form: Format | None

    @property
    def by_words(self) -> bool:
        """Whether columns of 8-bit or 16-bit numbers are contiguous, and all begin and end at multiples of 4 bytes."""
        source, itemsize = self.source, self.source.itemsize
        others = (source.address, source.rows * itemsize, source.strides[-1], *source.strides[:-2])
        return source.strides[-2] == itemsize <= 2 and not any(number % 4 for number in others)


@dataclass(frozen=True, eq=False)
class Copy:
    """One row of the table.

    Attributes
    ----------
    suits
        Whether these kernels can copy what is requested.
    recipes
        The kernels, in the order of their launches. Empty if CuPy copies.
    block
        Rows and columns of the source that one thread block copies, if they are fixed.
    """

    name: str
    idea: str
    suits: Callable[[Request], bool]
    recipes: Callable[[Request], tuple[Recipe, ...]]
    block: tuple[int, int] = (0, 0)


def _recipe(maker: str, *parameters: object) -> Recipe:
    return Recipe(f"distmm_kernels.device_code.copies.{maker}", parameters)


# `choose` returns the first row that suits. Kernels for contiguous k come first, since they need no transposition.
COPIES = (
    Copy(
        "realign",
        "rows that begin anywhere, shifted to whole vectors",
        lambda request: request.form is None and request.source.contiguous(-1),
        lambda _: (_recipe("realign:source"),),
    ),
    Copy(
        "transpose_words",
        "columns of 8-bit or 16-bit numbers, transposed by words of 4 bytes",
        lambda request: request.form is None and _down_columns(request.source) and request.by_words,
        lambda request: (_recipe("transpose_words:source", 4 // request.source.itemsize),),
        (TILE, TILE),
    ),
    Copy(
        "transpose",
        "columns of any numbers, transposed one by one",
        lambda request: request.form is None and _down_columns(request.source),
        lambda request: (_recipe("transpose:source", NUMBERS[request.source.itemsize]),),
        (TILE, TILE),
    ),
    Copy(
        "split_rows",
        "k contiguous: a block holds a row's granule in registers and reads memory once",
        lambda request: request.form is not None and request.source.contiguous(-1),
        lambda request: (
            _recipe("prepass:split_rows", request.form, request.source.aligned(-1), warps_of(request.source.columns)),
        ),
    ),
    Copy(
        "split_columns",
        "rows contiguous, and they stay so: maxima first, then the split",
        lambda request: request.form is not None and request.form.scaled and request.source.contiguous(-2),
        lambda request: (
            _recipe("prepass:find_maxima", request.source.aligned(-2)),
            _recipe("prepass:split_columns", request.form, request.source.aligned(-2)),
        ),
        (128, 128),
    ),
    Copy(
        "split_transposed",
        "rows contiguous in memory, k contiguous in the result, through a tile in shared memory",
        lambda request: request.form is not None and request.source.contiguous(-2),
        lambda request: (_recipe("prepass:split_transposed", request.form),),
        (32, 128),
    ),
    Copy("strided", "neighbours lie apart along both axes: CuPy copies", lambda _: True, lambda _: ()),
)


def choose(source: Stack, form: Format | None = None) -> tuple[Copy, tuple[Recipe, ...]]:
    """Return the copy that suits matrices and a format, and its kernels."""
    request = Request(source, form)
    copy = next(copy for copy in COPIES if copy.suits(request))
    return copy, copy.recipes(request)


def _down_columns(source: Stack) -> bool:
    """Whether a warp should read down the columns: their elements are closer together than those of the rows."""
    return abs(source.strides[-2]) < abs(source.strides[-1])

"""Tiles of the kernels whose operands come from shared memory by `ldmatrix`: index arithmetic, no device and no Numba.

`ldmatrix` reads four small matrices, of 8 rows of 16 bytes each, and deals them out to the lanes of a warp as
`mma.sync` wants its operands. In bytes this is the same for all types: an instruction multiplies 32 bytes of k.
Operands of 16 bits may also lie with k as slow axis: `ldmatrix` transposes those.

The lanes of an eighth of a read name 8 rows at the same place. So that these lie in different banks, units of 16 bytes
change places within a row: unit ``u`` of row ``r`` lies where unit ``u ^ r`` would, modulo 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from numpy import int32, uint32

from distmm_kernels.tiles.mma_tiles import LANES, lane_place
from distmm_kernels.tiles.tiling import VECTOR_BYTES, Tiling

__all__ = [
    "EDGE",
    "ITEMSIZE",
    "MULTIPLICANDS",
    "SHARED",
    "Fragment",
    "FragmentTiling",
    "Multiplicand",
    "Product",
    "tilings",
    "tilings_of_halves",
]

Multiplicand: TypeAlias = Literal["bfloat16", "float16", "int8", "tfloat32"]
ITEMSIZE: dict[Multiplicand, int] = {"bfloat16": 2, "float16": 2, "int8": 1, "tfloat32": 4}
# What tensor cores take as it is, by the name of its type.
MULTIPLICANDS: dict[str, Multiplicand] = {"bfloat16": "bfloat16", "float16": "float16", "int8": "int8"}

SPAN = 8  # units of 16 bytes in all banks of shared memory
EDGE = 16  # rows of A, and columns of B, that one ldmatrix of four matrices reads


class Fragment(NamedTuple):
    """What one ldmatrix reads: into four registers, from ``(begin ^ flipped) + offset``, counted in elements."""

    register: int
    flipped: int
    offset: int


class Product(NamedTuple):
    """Registers of one instruction, in its own order, among those that hold A, B and C."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    c: tuple[int, ...]


@dataclass(frozen=True)
class FragmentTiling(Tiling):
    """Sizes of one such kernel, in elements.

    Attributes
    ----------
    along_k
        Whether A, and whether B, have k as their fast axis, in memory and in shared memory. Others are of 16 bits.
    halves
        Whether A and B are sums of two matrices each, high and low, of which three products are added.

    Raises
    ------
    ValueError
        If the sizes are not consistent.
    """

    warp: ClassVar[tuple[int, int]] = LANES
    place: ClassVar[Any] = staticmethod(lane_place)

    along_k: tuple[bool, bool] = (True, True)
    halves: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in (("rows", self.part[0]), ("columns", self.part[1])):
            if size % EDGE or size & (size - 1):
                raise ValueError(f"{self}: a warp has {size} {name}, which must be a power of two from {EDGE} on")
        if self.itemsize != 2 and self.along_k != (True, True):
            raise ValueError(f"{self}: ldmatrix transposes elements of 2 bytes, these have {self.itemsize}")
        for operand in (0, 1):
            if self.threads // self.lanes(operand) % SPAN:
                raise ValueError(f"{self}: the rows that a thread copies must have the same order of units")

    @property
    def itemsize(self) -> int:
        """Bytes of an element of A and B."""
        return VECTOR_BYTES // self.vector

    @property
    def step(self) -> int:
        """See `Tiling.step`: an instruction multiplies two units along k."""
        return 2 * self.vector

    @property
    def runs(self) -> tuple[int, int]:
        """See `Tiling.runs`."""
        return 1, 2

    @property
    def widest(self) -> int:
        """See `Tiling.widest`."""
        return self.runs[1]

    @property
    def parts(self) -> int:
        """See `Tiling.parts`."""
        return 2 if self.halves else 1

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of a warp's part of the tile."""
        return self.warp[0] * self.thread_rows, self.warp[1] * self.thread_columns

    @property
    def operands(self) -> int:
        """Registers of A for two steps and of B for one: B's are loaded again as soon as they are multiplied."""
        return 4 * self.parts * (2 * self.part[0] + self.part[1]) // EDGE

    def vector_place(self, operand: int) -> Callable[[Any, Any], Any]:
        """See `Tiling.vector_place`."""
        pitch, vector = uint32(self.pitch(operand)), uint32(self.vector)
        each, mask = self._order(operand)
        return lambda row, number: int32(row * pitch + (number ^ row // each & mask) * vector)

    def first_read(self, operand: int) -> Callable[[Any, Any, Any], Any]:
        """See `Tiling.first_read`: a lane names one row of one of four matrices.

        The four are in the order of an instruction's registers. For A these are its upper and its lower rows at the
        first unit of k, then at the second; for B both units of its left columns, then of its right ones.
        """
        pitch, vector = uint32(self.pitch(operand)), uint32(self.vector)
        each, mask = self._order(operand)
        rows_first, along_k = (operand == 0) == self.along_k[operand], self.along_k[operand]
        beside = uint32(LANES[1])
        low, high = (uint32(8), uint32(16)) if rows_first else (uint32(16), uint32(8))

        def begin(first, row, column):  # type: ignore[no-untyped-def]
            lane = row * beside + column
            line = lane % uint32(8) + (lane & low) // low * uint32(8)
            unit = (lane & high) // high
            if along_k:
                line = first + line
            else:
                unit = first // vector + unit
            return int32(line * pitch + (unit ^ line // each & mask) * vector)

        return begin

    def _order(self, operand: int) -> tuple[Any, Any]:
        """Return which bits of a row are added to a unit's number: the row over the first, masked by the second."""
        units = self.lanes(operand)
        return uint32(max(1, SPAN // units)), uint32(min(SPAN, units) - 1)

    def fragments(self, operand: int, step: int) -> tuple[Fragment, ...]:
        """List what a warp reads of A or B for one instruction's steps of k, from those numbered ``step``."""
        pitch, along_k = self.pitch(operand), self.along_k[operand]
        found = []
        for i in range(self.part[operand] // EDGE):
            units = 2 * step if along_k else 2 * i  # two neighbours, of which the lanes' own bit chooses one
            lines = EDGE * i if along_k else self.step * step
            flipped = units % SPAN * self.vector
            found.append(Fragment(4 * i, flipped, lines * pitch + units // SPAN * SPAN * self.vector))
        return tuple(found)

    def products(self, number: int) -> tuple[Product, ...]:
        """List a step's instructions, 16 rows and 8 columns each, on B's fragment of that number: down and up again."""
        rows = range(self.part[0] // EDGE)
        return tuple(
            Product(
                tuple(range(4 * i, 4 * i + 4)),
                (2 * j, 2 * j + 1),
                tuple((2 * i + below) * self.thread_columns + 2 * j + e for below in (0, 1) for e in (0, 1)),
            )
            for j in (2 * number, 2 * number + 1)
            for i in (rows if j % 2 == 0 else reversed(rows))
        )


# KB of shared memory a block where it is more than 99 KB: the others take two stages less.
SHARED = {(8, 0): 163, (9, 0): 227, (10, 0): 227}


def tilings(
    operand: Multiplicand, compute_capability: tuple[int, int] | None, along_k: tuple[bool, bool]
) -> tuple[FragmentTiling, FragmentTiling]:
    """Return the tiling for large products of operands that lie so, then the one for small products.

    Measured on an H200, 2026-11-23, n = 8192, TFLOP/s; operands in C order have k, then n as their fast axis:

    - bfloat16 in C order: 478 by 128 x 256, 433 by 256 x 128; A along m 453 and 470; B along k 454 and 467;
    - TF32: 245 by 256 x 128, 221 by 128 x 256. int8: 910 by two blocks of 128 x 128 a multiprocessor, 859 by 256 x 128;
    - stages half as deep: 6 % to 24 % less; warps of 32 x 128 instead of 64 x 64: 1 % to 10 % less;
    - what 99 KB hold, two blocks of 128 x 128 with 3 stages: bfloat16 398 to 427, TF32 215, int8 862;
    - small tilings: bfloat16 379 by 64 x 128, 359 by 128 x 64, 299 by 64 x 64.
    """
    vector, shared = VECTOR_BYTES // ITEMSIZE[operand], SHARED.get(compute_capability or (0, 0), 99)
    small = FragmentTiling(
        64, 128, 4 * vector, 4 if shared > 99 else 3, 8, 8, vector, 3 if shared > 99 else 2, along_k=along_k
    )
    if shared == 99:
        sizes = 128, 128, 4, 3, 2
    elif operand == "int8":
        sizes = (128, 128, 8, 3, 2) if shared > 200 else (128, 128, 4, 4, 2)
    else:
        sizes = (128, 256, 8, 3, 1) if along_k == (True, False) else (256, 128, 8, 3, 1)
    rows, columns, units, stages, blocks = sizes
    return FragmentTiling(rows, columns, units * vector, stages, 8, 16, vector, blocks, along_k), small


def tilings_of_halves(
    operand: Multiplicand, compute_capability: tuple[int, int] | None, along_k: tuple[bool, bool]
) -> tuple[FragmentTiling, FragmentTiling]:
    """Return what `tilings` returns, for operands that are sums of two matrices each.

    A thread holds two sums for each element of C, so a warp has half as many elements.
    """
    vector, shared = VECTOR_BYTES // ITEMSIZE[operand], SHARED.get(compute_capability or (0, 0), 99)
    columns, blocks = (64, 1) if shared == 99 else (128, 2)
    large = FragmentTiling(128, columns, 4 * vector, 4, 8, 8, vector, 1, along_k, halves=True)
    return large, FragmentTiling(64, 64, 4 * vector, 4, 4, 8, vector, blocks, along_k, halves=True)

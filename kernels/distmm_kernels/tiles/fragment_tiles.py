"""Tiles of the kernels that load operands from shared memory by `ldmatrix`: index arithmetic, no device, no Numba.

`ldmatrix` reads four matrices, each of 8 rows of 16 bytes, and distributes them to the registers of a warp in the
operand layout of `mma.sync`. In bytes this layout is the same for all types: an instruction multiplies 32 bytes of k.
Operands of 16 bits need not be k-major in shared memory: `ldmatrix` can transpose them.

For each of the four matrices, 8 lanes give the addresses of 8 rows, at the same column. A swizzle puts these rows in
different banks: the 16-byte unit ``u`` of row ``r`` is stored as unit ``u ^ r``, modulo 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from numpy import int32, uint32

from distmm_kernels.tiles.mma_tiles import LANES, Product, lane_place
from distmm_kernels.tiles.tiling import VECTOR_BYTES, Tiling

Multiplicand: TypeAlias = Literal["bfloat16", "float16", "int8", "tfloat32"]
ITEMSIZE: dict[Multiplicand, int] = {"bfloat16": 2, "float16": 2, "int8": 1, "tfloat32": 4}
# Types that tensor cores multiply without a conversion, by name.
MULTIPLICANDS: dict[str, Multiplicand] = {
    "bfloat16": "bfloat16", "float16": "float16", "int8": "int8", "float8_e4m3fn": "float16", "float8_e5m2": "float16"
}  # fmt: skip

SPAN = 8  # units of 16 bytes that cover all banks of shared memory
EDGE = 16  # rows of A, and columns of B, that one ldmatrix of four matrices reads


class Fragment(NamedTuple):
    """One ldmatrix: the first of its four registers. A lane reads a row at element ``(begin ^ flipped) + offset``."""

    register: int
    flipped: int
    offset: int


@dataclass(frozen=True)
class FragmentTiling(Tiling):
    """Sizes of one kernel that uses `ldmatrix`, in elements.

    Attributes
    ----------
    along_k
        Whether A and B are k-major, in global memory and in shared memory. Otherwise they must have 16 bits.
    halves
        Whether A and B each are a sum of a high and a low matrix. The kernel then adds three products of these.

    Raises
    ------
    ValueError
        If the sizes are not consistent.
    """

    warp: ClassVar[tuple[int, int]] = LANES
    place: ClassVar[Any] = staticmethod(lane_place)
    runs: ClassVar[tuple[int, int]] = (1, 2)

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
        """See `Tiling.step`. An instruction multiplies two units along k."""
        return 2 * self.vector

    @property
    def parts(self) -> int:
        """See `Tiling.parts`."""
        return 2 if self.halves else 1

    @property
    def operands(self) -> int:
        """Operand registers of a thread: A's for two steps, B's for one. B's are reloaded after each multiplication."""
        return 4 * self.parts * (2 * self.part[0] + self.part[1]) // EDGE

    def vector_place(self, operand: int) -> Callable[[Any, Any], Any]:
        """See `Tiling.vector_place`."""
        pitch, vector = uint32(self.pitch(operand)), uint32(self.vector)
        each, mask = self._order(operand)
        return lambda row, number: int32(row * pitch + (number ^ row // each & mask) * vector)

    def first_read(self, operand: int) -> Callable[[Any, Any, Any], Any]:
        """See `Tiling.first_read`. A lane gives the address of one row of one of the four matrices.

        The matrices are in the order of an instruction's registers. For A: upper and lower rows at the first unit of k,
        then at the second. For B: both units of the left columns, then of the right ones.
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
        """Return ``each, mask`` of the swizzle: unit ``u`` of a row is stored as unit ``u ^ (row // each & mask)``."""
        units = self.lanes(operand)
        return uint32(max(1, SPAN // units)), uint32(min(SPAN, units) - 1)

    def fragments(self, operand: int, step: int) -> tuple[Fragment, ...]:
        """List the loads of A or B for one step of a warp: the steps of k of one instruction."""
        pitch, along_k = self.pitch(operand), self.along_k[operand]
        found = []
        for i in range(self.part[operand] // EDGE):
            units = 2 * step if along_k else 2 * i  # the first of two units; a bit of the lane selects one of them
            lines = EDGE * i if along_k else self.step * step
            flipped = units % SPAN * self.vector
            found.append(Fragment(4 * i, flipped, lines * pitch + units // SPAN * SPAN * self.vector))
        return tuple(found)

    def products(self, number: int) -> tuple[Product, ...]:
        """List a step's instructions on one fragment of B, each for 16 rows and 8 columns of C.

        They run down the rows for the fragment's left columns, and up for its right columns.
        """
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


# KB of shared memory that a block may have, if more than 99 KB. With 99 KB, tiles are smaller or have fewer stages.
SHARED = {(8, 0): 163, (9, 0): 227, (10, 0): 227}


def tilings(
    operand: Multiplicand, compute_capability: tuple[int, int] | None, along_k: tuple[bool, bool]
) -> tuple[FragmentTiling, FragmentTiling]:
    """Return the tiling for large products and the one for small products, for operands with these major axes.

    Measured on an H200, 2026-11-23, n = 8192, TFLOP/s. In C order, A is k-major and B n-major:

    - bfloat16 in C order: tiles of 128 x 256 reach 478, of 256 x 128 433. A m-major: 453 and 470. B k-major: 454 and
      467.
    - TF32: tiles of 256 x 128 reach 245, of 128 x 256 221. int8: two blocks of 128 x 128 on a multiprocessor reach 910,
      tiles of 256 x 128 859.
    - Stages half as deep: 6 % to 24 % less. Warp tiles of 32 x 128 instead of 64 x 64: 1 % to 10 % less.
    - With 99 KB of shared memory, two blocks of 128 x 128 with 3 stages: bfloat16 398 to 427, TF32 215, int8 862.
    - Small tilings, bfloat16: 64 x 128 reaches 379, 128 x 64 359, 64 x 64 299.
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

    A thread holds two accumulators for each element of C, so a warp tile has half as many elements.
    """
    vector, shared = VECTOR_BYTES // ITEMSIZE[operand], SHARED.get(compute_capability or (0, 0), 99)
    columns, blocks = (64, 1) if shared == 99 else (128, 2)
    large = FragmentTiling(128, columns, 4 * vector, 4, 8, 8, vector, 1, along_k, halves=True)
    return large, FragmentTiling(64, 64, 4 * vector, 4, 4, 8, vector, blocks, along_k, halves=True)

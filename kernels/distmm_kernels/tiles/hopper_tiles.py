"""Tiles of the Hopper kernel: which are legal, their layout in shared memory, and which lane handles what. Pure.

One thread block of three warpgroups owns a tile of C at a time. The first warpgroup's first thread loads: *stages* of A
and B, each 128 bytes of k deep, arrive in shared memory by TMA. The other two warpgroups multiply them, 64 rows each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from numpy import uint32

__all__ = [
    "COORDINATES",
    "C_BOX_BYTES",
    "C_BOX_COLUMNS",
    "GROUP",
    "MOST_C_STAGES",
    "MOST_PANELS",
    "ROWS",
    "STRETCH",
    "WIDEST_OF_TWO",
    "HopperTile",
    "OperandFormat",
    "Output",
    "best_columns",
    "box_place",
    "cost",
    "pairs_place",
    "place",
]

OperandFormat: TypeAlias = Literal["bfloat16", "float16", "tfloat32", "int8", "uint8"]
Output: TypeAlias = Literal["float32", "int32", "float16", "bfloat16", "int8", "uint8", "bool"]

ROWS = 128  # of a tile: two warpgroups, and wgmma multiplies 64 rows
SPAN = 128  # bytes of k in a stage, and of a row of each box in shared memory: the width of the widest swizzle
WARP_ROWS = 16  # of C in the registers of one warp
CONSUMERS = 8  # warps
THREADS = 384
SHARED_MEMORY = 232_448  # bytes that one block may have on compute capability 9.0
BARRIERS = 1024  # bytes set aside for them; 16 a stage are used
MOST_STAGES = 8
WIDEST_OF_TWO = 192  # columns of which two sets of accumulators fit in registers

# Steps of k whose sum float products leave to the tensor cores. An instruction, of 16 steps or of TF32's 8, cuts each
# product and the sum off 25 bits below the largest, and the result to 24 bits, which adds up: where all numbers are
# positive, to 0.6 % at k = 2^20. In so many steps it is 3.2e-4 of |A||B| at most in 16 bits, and 4.0e-4 in TF32; where
# numbers are from U(0, 1), 4.9e-5 and 5.6e-5 (`distmm_kernels.reference.twins`). Rounding TF32 operands takes 4.9e-4.
# Shorter stretches would cut a deep k into more slices (`distmm_kernels.tiles.slices`), but their sums are taken out
# more often. Of cuBLAS's rate an H200 has, bfloat16, by stretches of 8192, 4096 and 2048: 0.97, 0.91, 0.93 at 16384;
# 0.99, 0.93, 0.92 at 4096 x 8192 x 4096; 0.99, 0.94, 0.81 at 512 x 65536 x 512, in 8, 16 and 32 slices.
STRETCH = 8192

COORDINATES = 2**31  # of an element along each axis of a matrix, and of a matrix in a batch: signed numbers of 32 bits

C_BOX_COLUMNS = SPAN // 4  # of C, which is of 32 bits, in one box: all rows of a tile, 128 bytes of each
C_BOX_BYTES = ROWS * SPAN
MOST_C_STAGES = 3  # that a tile of C comes in
MOST_PANELS = 8  # of one launch: their tensor maps take 2 of the 4 KiB that a kernel's parameters may

# Blocks that run at the same time share rows of A and columns of B in the second-level cache: tiles are numbered down
# this many rows of tiles before they go on to the next column. 4 to 16 make no difference on an H200.
GROUP = 16

_BITS = {
    "bfloat16": 16, "float16": 16, "tfloat32": 32, "int8": 8, "uint8": 8, "bool": 8, "float32": 32, "int32": 32
}  # fmt: skip
_INTEGERS = ("int8", "uint8")


@dataclass(frozen=True)
class HopperTile:
    """One variant of the Hopper kernel.

    Attributes
    ----------
    operand
        What the tensor cores multiply. ``tfloat32``: float32 whose last 13 bits they do not read.
    output
        Type of D. A narrower one than the accumulator's is rounded to nearest even at the end; int8 is the
        residue of int32 sums modulo a number of each matrix, uint8 their last 8 bits; bool says which are not zero.
    columns
        Of a tile.
    a_major, b_major
        Axis that is contiguous in memory; ``m`` and ``n`` for 16-bit operands only.
    products
        1, or 3: A and B each come as a high and a low part, and D is ``A_low B_high + A_high B_low + A_high B_high``.
        Their sum is added to float32 totals after each stage: the tensor cores' own sum is truncated, not rounded.
    promotes
        Whether k may exceed `STRETCH`, in one float product: the sum of each `STRETCH` steps is then taken out, and
        added to float32 totals, which start from C.
    sliced
        Whether each `STRETCH` steps of k are a product of their own, which D has a matrix for
        (`distmm_kernels.tiles.slices`).
    adds
        Whether there is a C of the accumulator's type.
    scaled
        Whether rows and columns of the product are multiplied by given powers of two; C is added after that.
    panels
        Whether A and B come as panels of k, up to `MOST_PANELS`, each in memory of its own; sums of floats are taken
        out after each (``promotes``). All but the last have the same steps of k.
    finishes
        Whether the sum is multiplied by alpha.
    c0
        Type of a matrix of which beta times as much is added after that; None: there is none.
    buffers
        The most boxes of 2 KiB that a warp has for rows of D, which the TMA stores from there.

    Raises
    ------
    ValueError
        If the hardware cannot do it, or shared memory does not hold two stages.
    """

    operand: OperandFormat
    output: Output
    columns: int = 256
    a_major: Literal["k", "m"] = "k"
    b_major: Literal["k", "n"] = "n"
    products: Literal[1, 3] = 1
    promotes: bool = False
    sliced: bool = False
    adds: bool = False
    scaled: bool = False
    panels: bool = False
    finishes: bool = False
    c0: Literal["float32", "float16", "bfloat16"] | None = None
    buffers: int = 2

    def __post_init__(self) -> None:
        widest = WIDEST_OF_TWO if self.two_sets else 256
        if self.columns % 64 or not 64 <= self.columns <= widest:
            raise ValueError(f"{self.columns} columns: use a multiple of 64 up to {widest}")
        if self.sliced and (self.two_sets or self.adds or self.output != self.accumulator):
            raise ValueError(f"{self}: slices are sums of the accumulator's type, added to C and to each other later")
        if self.promotes and (self.products == 3 or self.operand in _INTEGERS):
            raise ValueError(f"{self}: three products are taken out each stage, and sums of integers are exact")
        outputs = {"int8": ("int32", "uint8", "int8"), "uint8": ("int32", "uint8", "bool")}.get(
            self.operand, ("float32", "float16", "bfloat16")
        )
        if self.output not in outputs:
            raise ValueError(f"{self.operand} to {self.output}: its products are {', '.join(outputs)}")
        if self.output in ("int8", "bool") and self.adds:
            raise ValueError(f"{self}: residues and truths are of A B, without a C")
        if self.columns % self.box_columns:
            raise ValueError(f"{self}: bytes are stored in boxes of {self.box_columns} columns")
        if self.panels and (self.products == 3 or self.sliced or self.promotes != (self.accumulator == "float32")):
            raise ValueError(f"{self}: panels are of one product, and sums of floats are taken out after each")
        if (self.finishes and (self.accumulator != "float32" or self.sliced)) or (self.c0 and not self.finishes):
            raise ValueError(f"{self}: sums of floats are multiplied by alpha, and beta C0 is added after that")
        if (self.a_major, self.b_major) != ("k", "k") and _BITS[self.operand] != 16:
            raise ValueError(f"{self.operand} operands must be contiguous along k, not {self.a_major}, {self.b_major}")
        if self.stages < 2:
            raise ValueError(f"{self.stages} stage fits in shared memory, two are needed: use fewer columns or buffers")

    @property
    def accumulator(self) -> Output:
        """Type of C, and of the sums."""
        return "int32" if self.operand in _INTEGERS else "float32"

    @property
    def extended(self) -> bool:
        """Whether the kernel has the parameters of panels and of the finish."""
        return self.panels or self.finishes

    @property
    def two_sets(self) -> bool:
        """Whether there are totals beside the tensor cores' sums."""
        return self.products == 3 or self.promotes

    @property
    def starts_from_c(self) -> bool:
        """Whether totals start from C. Otherwise it is added last, rounded to nearest: tensor cores would truncate."""
        return self.adds and (self.promotes or self.accumulator == "int32")

    @property
    def itemsize(self) -> int:
        """Bytes of an operand's element."""
        return _BITS[self.operand] // 8

    @property
    def depth(self) -> int:
        """Steps of k in a stage."""
        return SPAN // self.itemsize

    @property
    def instruction_depth(self) -> int:
        """Steps of k in one wgmma: always 32 bytes."""
        return 32 // self.itemsize

    @property
    def a_bytes(self) -> int:
        """Bytes of one part of A in a stage."""
        return ROWS * SPAN

    @property
    def b_bytes(self) -> int:
        """Bytes of one part of B in a stage."""
        return self.columns * SPAN

    @property
    def parts(self) -> int:
        """1, or 2 where operands come as a high and a low part."""
        return 2 if self.products == 3 else 1

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that one stage takes."""
        return self.parts * (self.a_bytes + self.b_bytes)

    @property
    def c_boxes(self) -> int:
        """Boxes of C in a tile."""
        return self.columns // C_BOX_COLUMNS

    @property
    def c_stage_boxes(self) -> int:
        """Boxes of C that come in one stage; the last one may have fewer."""
        return min(self.c_boxes, self.stage_bytes // C_BOX_BYTES)

    @property
    def c0_boxes(self) -> int:
        """Boxes of C0 in a tile."""
        return 0 if self.c0 is None else self.columns // self.c0_columns

    @property
    def c0_columns(self) -> int:
        """Columns of C0 in a box."""
        return SPAN * 8 // _BITS[self.c0 or "float32"]

    @property
    def c0_stage_boxes(self) -> int:
        """Boxes of C0 that come in one stage; the last one may have fewer."""
        return min(self.c0_boxes, self.stage_bytes // C_BOX_BYTES)

    @property
    def staging_bytes(self) -> int:
        """Bytes of shared memory from which the TMA stores rows of D."""
        return CONSUMERS * self.slots * WARP_ROWS * SPAN

    @property
    def slots(self) -> int:
        """Boxes of a warp, used in turn: as many as divide the boxes of a tile."""
        boxes = self.columns // self.box_columns
        return max(slots for slots in range(1, self.buffers + 1) if boxes % slots == 0)

    @property
    def stages(self) -> int:
        """Stages that fit: one is multiplied while the others are loaded."""
        return min(MOST_STAGES, (SHARED_MEMORY - BARRIERS - self.staging_bytes) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return self.stages * self.stage_bytes + self.staging_bytes + BARRIERS

    @property
    def box_columns(self) -> int:
        """Columns of D in one box of 128 bytes a row."""
        return SPAN * 8 // _BITS[self.output]

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a loading and of a multiplying thread. All together have 3 x 168 at the launch."""
        return (24, 240) if self.two_sets else (40, 232)


def place(tile: Any, high: Any, wide: Any, group: Any) -> tuple[Any, Any]:
    """Return row and column of a tile, in tiles, in a C of ``high`` by ``wide`` tiles.

    Numbers run down ``group`` rows, then along the columns, then to the next group; the last group may be lower.
    All integers are unsigned, of 32 bits: the kernel calls this function too.
    """
    above = uint32(tile // uint32(group * wide) * group)
    height = uint32(min(group, high - above))
    inside = uint32(tile - above * wide)
    column = uint32(inside // height)
    return uint32(above + inside - column * height), column


def box_place(output: Output) -> Callable[[Any], tuple[Any, Any]]:
    """Return the function that says where the lanes of a warp write the first 8 or 16 columns of a box of D.

    From a lane (unsigned, 32 bits) to bytes from the box's start, and bytes within a row of 128 that are still to be
    combined with the columns' place by exclusive or: unit ``u`` of 16 bytes in row ``r`` lies at unit ``u ^ (r % 8)``.
    """
    return {32: _words_place, 16: _halves_place, 8: _bytes_place}[_BITS[output]]


def _words_place(lane):  # type: ignore[no-untyped-def]
    """8 rows of 8 words: each lane writes two words of one row, half a unit."""
    row, pair = uint32(lane // uint32(4)), uint32(lane % uint32(4))
    return row * uint32(SPAN) + pair % uint32(2) * uint32(8), (pair // uint32(2) ^ row) * uint32(16)


def _halves_place(lane):  # type: ignore[no-untyped-def]
    """Four matrices of 8 rows of one unit: upper, lower rows of 8 columns, then of the next 8; a lane names a row."""
    matrix, row = uint32(lane // uint32(8)), uint32(lane % uint32(8))
    return (matrix % uint32(2) * uint32(8) + row) * uint32(SPAN), (matrix // uint32(2) ^ row) * uint32(16)


def pairs_place(lane):  # type: ignore[no-untyped-def]
    """Like `box_place`, for a lane that reads two neighbours of 16 bits: 8 rows of 8 columns, one unit each."""
    row, pair = uint32(lane // uint32(4)), uint32(lane % uint32(4))
    return row * uint32(SPAN) + pair * uint32(4), row * uint32(16)


def _bytes_place(lane):  # type: ignore[no-untyped-def]
    """8 rows of 8 bytes, half a unit: each lane writes two bytes of one row."""
    row, pair = uint32(lane // uint32(4)), uint32(lane % uint32(4))
    return row * uint32(SPAN) + pair * uint32(2), row * uint32(16)


# Rates of tiles by columns, where all multiprocessors are busy, for one product and for three (H200, n = 8192 and 4096)
RATES = {1: {256: 1.0, 192: 0.99, 128: 0.96, 64: 0.6}, 3: {192: 1.0, 128: 0.93, 64: 0.6}}


@functools.lru_cache(maxsize=1024)
def best_columns(m: int, n: int, batch: int, products: int, multiprocessors: int, widest: int = 256) -> int:
    """Return how wide tiles should be for products ``(batch, m, n)``, up to the widest.

    A wide tile loads less for each multiplication. Narrow ones balance a small product, or the last round, better.
    """
    widths = (columns for columns in RATES[products] if columns <= widest)
    return min(widths, key=lambda columns: cost(m, n, batch, products, multiprocessors, columns))


def cost(m: int, n: int, batch: int, products: int, multiprocessors: int, columns: int) -> float:
    """Time of products ``(batch, m, n)`` by tiles of a width, in that of one column of a tile of the best width."""
    tiles = -(-m // ROWS) * batch * -(-n // columns)
    return -(-tiles // multiprocessors) * columns / RATES[products][columns]

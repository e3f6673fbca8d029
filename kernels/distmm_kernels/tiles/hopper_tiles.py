"""Tiles of the Hopper kernel: legal variants, and their layout in shared memory. Pure.

One thread block of three warpgroups computes one tile of C at a time. The first warpgroup is the producer: its first
thread loads pipeline *stages* of A and B into shared memory by TMA. A stage has 128 bytes of k. The other two
warpgroups are the consumers: each multiplies 64 rows of the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

OperandFormat: TypeAlias = Literal["bfloat16", "float16", "tfloat32", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"]
Output: TypeAlias = Literal["float32", "int32", "float16", "bfloat16", "int8", "uint8", "bool"]

ROWS = 128  # of a tile: two warpgroups, and wgmma multiplies 64 rows
SPAN = 128  # bytes of k in a stage, and of a row of each box in shared memory: the 128-byte swizzle is the widest
WARP_ROWS = 16  # rows of C in the registers of one warp
CONSUMERS = 8  # warps of the consumer warpgroups
THREADS = 384
SHARED_MEMORY = 232_448  # bytes that one block may have on compute capability 9.0
BARRIERS = 1024  # bytes of shared memory for barriers; each stage uses 16
MOST_STAGES = 8
# Of a tile that promotes and has `WIDEST_OF_TWO` columns. With more stages thread blocks drift apart more over a deep
# k, and read more from memory: bfloat16 plus a float32 C, n = 16384, H100, 13.2 ms with 3 stages, 13.9 with 4. A tile
# of 256 columns has 4: with 3 it had 0.95 of cuBLAS's rate at n = 8192 in bfloat16, and 1.38 times it in int8; with 4
# it had 0.98 and 1.65.
STAGES_OF_DEEP = 3
WIDEST_OF_TWO = 192  # the most columns for which two sets of accumulators fit in registers
WIDEST_OF_BLOCKS = 128  # the most columns for which two sets and the factors of a block of k fit

# Steps of k that tensor cores sum before the sum is added to float32 totals (promotion), in float products.
#
# Why promotion: an instruction has 16 steps of k, or 8 for TF32. It truncates each product and the accumulator 25 bits
# below the largest of them, and the result to 24 bits. These errors accumulate. If all numbers are positive, they reach
# 0.6 % at k = 2^20. In 8192 steps the error is at most 3.2e-4 of |A||B| in 16 bits, and 4.0e-4 in TF32. If the numbers
# are from U(0, 1), it is 4.9e-5 and 5.6e-5 (`twins.py` of the tests). Rounding operands to TF32 alone makes an
# error of 4.9e-4.
#
# Why 8192: with fewer steps, split-K has more slices (`distmm_kernels.tiles.slices`), but sums are added to the totals
# more often. Rates with 8192, 4096 and 2048 steps on an H200, bfloat16, relative to cuBLAS: 0.97, 0.91 and 0.93 at n =
# 16384; 0.99, 0.93 and 0.92 at 4096 x 8192 x 4096; 0.99, 0.94 and 0.81 at 512 x 65536 x 512, in 8, 16 and 32 slices.
STRETCH = 8192

# The same for 8-bit floats. An instruction has 32 steps of k, and truncates 13 bits below the largest product or sum.
# With numbers from U(0, 1), the error is 5e-4 of AB in 128 steps, which are one stage, and 0.13 in 8192 steps
# (`twins.py` of the tests).
STRETCH_OF_FLOAT8 = 128

COORDINATES = 2**31  # the TMA counts elements along each axis, and matrices of a batch, with signed 32-bit numbers

C_BOX_BYTES = ROWS * SPAN  # of a box of C, which has 128 bytes of each row of a tile
MOST_C_STAGES = 3  # the most stages in which a tile of C is loaded
MAP_BYTES = 128  # size of a TMA descriptor
MOST_PANELS = 8  # of one launch: their descriptors take 2 of the 4 KiB of a kernel's parameters

# Rasterisation: tiles are numbered down this many rows of tiles, then down the next column of tiles. So thread blocks
# that run at the same time share rows of A and columns of B in the L2 cache. 4 to 16 make no difference on an H200.
# A symmetric C has other groups (`distmm_kernels.tiles.hopper_places.pairs_in_group`).
GROUP = 16

# Stages that a thread block loads before it waits for the others, a power of two: 6 to 12 us of work. The L2 cache
# holds what all blocks load in some 30 us (`distmm_kernels.device_code.hopper.pace`). 4 and 8 are as fast, 32 is 3 %
# slower.
PACE = 16
UNPACED = 256  # stages of a launch, about 0.15 ms, in which blocks do not drift far; a multiple of PACE

BITS = {
    "bfloat16": 16, "float16": 16, "tfloat32": 32, "int8": 8, "uint8": 8, "bool": 8, "float32": 32, "int32": 32,
    "float8_e4m3fn": 8, "float8_e5m2": 8,
}  # fmt: skip
_INTEGERS = ("int8", "uint8")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def box_columns(kind: Output) -> int:
    """Columns of a C, C0 or D of this type in one box, whose rows have 128 bytes."""
    return SPAN * 8 // BITS[kind]


def widest(two_sets: bool, of_blocks: bool = False) -> int:
    """Columns of the widest tile: with two sets of accumulators, or with these and the factors of a block of k."""
    return WIDEST_OF_BLOCKS if of_blocks else WIDEST_OF_TWO if two_sets else 256


@dataclass(frozen=True)
class HopperTile:
    """One variant of the Hopper kernel.

    Attributes
    ----------
    operand
        Type that the tensor cores multiply. ``tfloat32`` is float32 without its last 13 bits, which they do not read.
    output
        Type of D. The epilogue rounds float32 sums to a narrower float type, to nearest even. From int32 sums it stores
        in int8 the residue modulo a number of each matrix, in uint8 the last 8 bits, and in bool whether the sum is not
        zero.
    columns
        Columns of a tile.
    a_major, b_major
        Axis that is contiguous in memory. ``m`` and ``n`` are for 16-bit operands only.
    products
        1 or 3. With 3, A and B each have a high and a low part, and D is ``A_low B_high + A_high B_low + A_high
        B_high``. The tensor cores' sum is added to float32 totals after each stage, since tensor cores truncate.
    promotes
        Whether k may exceed `STRETCH` in a float product. Then the tensor cores' sum of each `STRETCH` steps is added
        to float32 totals, and C to the first sum.
    sliced
        Split-K: whether each `STRETCH` steps of k are a separate product, with its own matrix of D
        (`distmm_kernels.tiles.slices`).
    adds
        Whether a C of the accumulator's type is added.
    scaled
        Whether the epilogue multiplies rows and columns of the product by given powers of two, before it adds C.
    panels
        Whether A and B are given as up to `MOST_PANELS` panels of k, each in separate memory. All panels but the last
        have the same number of steps. Sums of floats are added to the float32 totals after each panel (``promotes``).
    finishes
        Whether the epilogue multiplies the sum by alpha.
    c0
        Type of a matrix C0. The epilogue adds beta * C0 after the multiplication by alpha. None: there is no C0.
    symmetric
        1 if B is the transpose of A, so that D is symmetric. Only tiles that touch the diagonal or lie below it are
        computed. The epilogue stores each box of D below the diagonal a second time, as its mirror image. D of int8 is
        an exception: its elements above the diagonal have any value. 2 if D is a symmetric or Hermitian matrix whose
        real and imaginary parts alternate along rows; also then, elements above the diagonal have any value.
    b_operand
        Type of B, if A is an 8-bit float and B the other one.
    scaled_blocks
        Whether the sum of each stage, of 8-bit floats, is multiplied by a factor of each row and of each column before
        it is added to the totals. Each stage has its own factors.

    Raises
    ------
    ValueError
        If the hardware does not support the variant.
    """

    a_bytes: ClassVar[int] = ROWS * SPAN  # of one part of A in a stage

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
    symmetric: int = 0
    b_operand: OperandFormat | None = None
    scaled_blocks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "symmetric", int(self.symmetric))  # True and 1 are the same kernel
        most = widest(self.two_sets, self.scaled_blocks)
        if self.columns % 64 or not 64 <= self.columns <= most:
            raise ValueError(f"{self.columns} columns: use a multiple of 64 up to {most}")
        if self.sliced and (self.two_sets or self.adds or self.output != self.accumulator):
            raise ValueError(f"{self}: slices are sums of the accumulator's type, added to C and to each other later")
        if self.promotes and (self.products == 3 or self.operand in _INTEGERS):
            raise ValueError(
                f"{self}: three products are added to the totals each stage anyway, and sums of integers are exact"
            )
        if self.float8 and not self.promotes:
            raise ValueError(f"{self}: sums of 8-bit floats are added to the totals after each stage")
        if (self.b_operand or self.scaled_blocks) and not self.float8:
            raise ValueError(f"{self}: only 8-bit floats may be of two types, or have factors of blocks")
        outputs = {"int8": ("int32", "uint8", "int8"), "uint8": ("int32", "uint8", "bool")}.get(
            self.operand, ("float32", "float16", "bfloat16")
        )
        if self.output not in outputs:
            raise ValueError(f"{self.operand} to {self.output}: its products are {', '.join(outputs)}")
        if self.output in ("int8", "bool") and self.adds:
            raise ValueError(f"{self}: residues and truths are of A B, without a C")
        if self.symmetric and (
            self.output in ("uint8", "bool") or (self.products == 3 and self.output != self.accumulator)
        ):
            raise ValueError(f"{self}: a symmetric D has 16 or 32 bits, that of three products 32: convert it later")
        if self.columns % box_columns(self.output):
            raise ValueError(f"{self}: bytes are stored in boxes of {box_columns(self.output)} columns")
        if self.panels and (self.products == 3 or self.sliced or self.promotes != (self.accumulator == "float32")):
            raise ValueError(
                f"{self}: panels are of one product, and sums of floats are added to the totals after each"
            )
        if (self.finishes and (self.accumulator != "float32" or self.sliced)) or (self.c0 and not self.finishes):
            raise ValueError(f"{self}: sums of floats are multiplied by alpha, and beta C0 is added after that")
        if (self.a_major, self.b_major) != ("k", "k") and BITS[self.operand] != 16:
            raise ValueError(f"{self.operand} operands must be contiguous along k, not {self.a_major}, {self.b_major}")

    @property
    def accumulator(self) -> Output:
        """Type of the accumulators, and of C."""
        return "int32" if self.operand in _INTEGERS else "float32"

    @property
    def float8(self) -> bool:
        """Whether the operands are 8-bit floats."""
        return self.operand in _FLOAT8

    @property
    def stretch(self) -> int:
        """Steps of k after which a tile that promotes adds the tensor cores' sum to the totals."""
        return STRETCH_OF_FLOAT8 if self.float8 else STRETCH

    @property
    def takes_turns(self) -> bool:
        """Whether the two warpgroups take turns: one multiplies a stage while the other adds its sum to the totals."""
        return self.products == 3 or self.float8

    @property
    def adds_early(self) -> bool:
        """Whether C is added to the sum of the first `stretch`; otherwise to the product, after its scales."""
        return self.adds and self.promotes and not self.scaled

    @property
    def two_sets(self) -> bool:
        """Whether a thread holds float32 totals in addition to the tensor cores' accumulators."""
        return self.products == 3 or self.promotes

    @property
    def deep(self) -> bool:
        """Whether the tile promotes and is as wide as such a tile can be."""
        return self.promotes and self.columns == WIDEST_OF_TWO

    @property
    def itemsize(self) -> int:
        """Bytes of an operand's element."""
        return BITS[self.operand] // 8

    @property
    def depth(self) -> int:
        """Steps of k in a stage."""
        return SPAN // self.itemsize

    @property
    def instruction_depth(self) -> int:
        """Steps of k in one wgmma: always 32 bytes."""
        return 32 // self.itemsize

    @property
    def b_bytes(self) -> int:
        """Bytes of one part of B in a stage."""
        return self.columns * SPAN

    @property
    def parts(self) -> int:
        """Parts of each operand: 2 if it has a high and a low part, else 1."""
        return 2 if self.products == 3 else 1

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that one stage takes."""
        return self.parts * (self.a_bytes + self.b_bytes)

    def boxes(self, kind: Output) -> tuple[int, int]:
        """Boxes of a C or C0 of this type in a tile, and in a stage of its loads. The last stage may have fewer."""
        boxes = self.columns // box_columns(kind)
        return boxes, min(boxes, self.stage_bytes // C_BOX_BYTES)

    @property
    def staging_bytes(self) -> int:
        """Bytes of shared memory from which the TMA stores rows of D."""
        return CONSUMERS * self.slots * WARP_ROWS * SPAN

    @property
    def slots(self) -> int:
        """Staging boxes of a warp, used in turn. Their number divides the number of boxes that it stores of a tile."""
        boxes, most = self.columns // box_columns(self.output) * (2 if self.mirrors else 1), 3 if self.deep else 2
        return max(slots for slots in range(1, most + 1) if boxes % slots == 0)

    @property
    def mirrors(self) -> bool:
        """Whether the epilogue stores mirror images."""
        return self.symmetric == 1 and self.output != "int8"

    @property
    def stages(self) -> int:
        """Pipeline stages that fit in shared memory: one is multiplied while the others are loaded."""
        most = STAGES_OF_DEEP if self.deep and not self.float8 else MOST_STAGES
        return min(most, (SHARED_MEMORY - BARRIERS - self.staging_bytes) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return self.stages * self.stage_bytes + self.staging_bytes + BARRIERS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer thread and of a consumer thread. The three warpgroups have 3 x 168 at the launch."""
        if not self.two_sets:
            return 40, 232
        return (40, 224) if self.panels else (24, 240)  # the producer's loop over panels takes more

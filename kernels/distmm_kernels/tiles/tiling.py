"""Tiles of the register-tiled kernel, down to the elements of each thread: index arithmetic, no device, no Numba.

A thread block computes a tile of C, a warp a part of the tile, and a thread ``thread_rows x thread_columns`` elements.
A pipeline stage has ``depth`` steps of k of A and B, both stored with k as the first axis. This module computes the
offsets that are constants of the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from numpy import int32, uint32

# Threads of a warp along the rows and along the columns of its part of C.
WARP = (4, 8)

VECTOR_BYTES = 16  # the widest load of a thread, and the alignment that the tensor memory accelerator demands

Offsets: TypeAlias = tuple[tuple[int, int], ...]


def lane_place(lane):  # type: ignore[no-untyped-def]  # Python's int or Numba's
    """Row and column of a lane among the ``WARP`` of its warp.

    The hardware serves a load of 16 bytes for half a warp at a time. It takes one pass if lanes that differ in one of
    their two lowest bits load the same address, and two otherwise. So one of these bits belongs to the row, and one to
    the column. Then loads of A and of B both take two passes, the fewest for 16 vectors.
    """
    return lane >> 4 << 1 | lane >> 1 & 1, (lane >> 2 & 3) << 1 | lane & 1


@dataclass(frozen=True)
class Tiling:
    """Sizes of one register-tiled kernel, in elements.

    Attributes
    ----------
    rows, columns
        Size of a thread block's tile of C.
    depth
        Steps of k in one stage.
    stages
        Pipeline stages in shared memory: one is multiplied while the others are loaded.
    thread_rows, thread_columns
        Size of a thread's part of C, which is in registers.
    vector
        Elements of one vector in shared memory. The rows and columns above are multiples of it.
    blocks
        Thread blocks that must fit on a multiprocessor at the same time. This limits the registers of each thread.

    Raises
    ------
    ValueError
        If the sizes are not consistent.
    """

    warp: ClassVar[tuple[int, int]] = WARP
    place: ClassVar[Any] = staticmethod(lane_place)
    sets: ClassVar[int] = 2  # of registers that hold the operands of a step; two are used in turn

    rows: int
    columns: int
    depth: int
    stages: int
    thread_rows: int
    thread_columns: int
    vector: int
    blocks: int = 2

    def __post_init__(self) -> None:
        for name, whole, part in (
            ("rows", self.rows, self.part[0]),
            ("columns", self.columns, self.part[1]),
            ("depth", self.depth, self.sets * self.step),
            ("thread_rows", self.thread_rows, self.runs[0]),
            ("thread_columns", self.thread_columns, self.runs[1]),
        ):
            if whole <= 0 or part <= 0 or whole % part:
                raise ValueError(f"{self}: {name} is {whole}, which must be a positive multiple of {part}")
        if self.stages < 2:
            raise ValueError(f"{self} has {self.stages} stages: one is multiplied while others fill, so give 2 or more")
        if self.threads > 1024:
            raise ValueError(f"{self} has {self.threads} threads a block, CUDA allows 1024: use larger thread tiles")
        for operand in (0, 1):
            self.copies(operand)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows // self.thread_rows * (self.columns // self.thread_columns)

    @property
    def along_k(self) -> tuple[bool, bool]:
        """Whether A and B are k-major."""
        return False, False

    @property
    def step(self) -> int:
        """Steps of k whose operands a thread loads into registers at the same time."""
        return 1

    @property
    def runs(self) -> tuple[int, int]:
        """Consecutive elements of a column, and of a row, of C that a thread owns."""
        return self.vector, self.vector

    @property
    def widest(self) -> int:
        """Elements of the widest vector of C that a thread owns."""
        return self.runs[1]

    @property
    def parts(self) -> int:
        """Number of matrices whose sum is A, and also B. A stage has the tiles of all of them, one after another."""
        return 1

    @property
    def operands(self) -> int:
        """Operand registers of a thread: those of one step, and of the next."""
        return 2 * (self.thread_rows + self.thread_columns)

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of the warp tile."""
        return self.warp[0] * self.thread_rows, self.warp[1] * self.thread_columns

    @property
    def warp_rows(self) -> int:
        """Warps of a block along the rows of its tile."""
        return self.rows // self.part[0]

    @property
    def shared_bytes(self) -> int:
        """Bytes of all stages in shared memory."""
        return self.stages * (self.stage_elements(0) + self.stage_elements(1)) * VECTOR_BYTES // self.vector

    def offset(self, axis: int, element: int) -> int:
        """Row (axis 0) or column (1) of a thread's element, from its first. The lanes' vectors are interleaved."""
        run = self.runs[axis]
        return element // run * self.warp[axis] * run + element % run

    def outputs(self, width: int) -> Offsets:
        """List ``(row, column)`` of each of a thread's vectors of C, from the thread's first element, row by row."""
        return tuple(
            (self.offset(0, i), self.offset(1, j))
            for i in range(self.thread_rows)
            for j in range(0, self.thread_columns, width)
        )

    def step_registers(self, k: int) -> tuple[int, int]:
        """First register of A's and of B's operands of step ``k``. There are two sets of registers, used in turn."""
        first = k % 2 * (self.thread_rows + self.thread_columns)
        return first, first + self.thread_rows

    def step_vectors(self, k: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """List ``(register, offset in the tile)`` of each vector that a thread loads for step ``k``, of A and of B."""
        a, b = self.step_registers(k)
        return (
            [(a + i, k * self.rows + self.offset(0, i)) for i in range(0, self.thread_rows, self.vector)],
            [(b + j, k * self.columns + self.offset(1, j)) for j in range(0, self.thread_columns, self.vector)],
        )

    def tile(self, operand: int) -> tuple[int, int]:
        """Rows and columns of a tile of A (0) or B (1) in shared memory."""
        width = (self.rows, self.columns)[operand]
        return (width, self.depth) if self.along_k[operand] else (self.depth, width)

    def pitch(self, operand: int) -> int:
        """Elements from a row of the tile in shared memory to the next."""
        return self.tile(operand)[1]

    def steps(self, operand: int) -> tuple[int, int]:
        """Elements of a tile from one row of A, or column of B, to the next, and from one step of k to the next."""
        return (self.pitch(operand), 1) if self.along_k[operand] else (1, self.pitch(operand))

    def stage_elements(self, operand: int) -> int:
        """Elements of one stage of A (0) or B (1) in shared memory."""
        return self.parts * self.part_elements(operand)

    def part_elements(self, operand: int) -> int:
        """Elements of a tile of one part."""
        return self.tile(operand)[0] * self.pitch(operand)

    def vector_place(self, operand: int) -> Callable[[Any, Any], Any]:
        """Return ``(row, number)``, a function that returns the offset of a vector of a row of the tile.

        The integers of this function and of `first_read` are uint32: the kernel calls them, too.
        """
        pitch, vector = uint32(self.pitch(operand)), uint32(self.vector)
        return lambda row, number: int32(row * pitch + number * vector)

    def first_read(self, operand: int) -> Callable[[Any, Any, Any], Any]:
        """Return ``(first, row, column)``, a function that returns the offset in a tile of a thread's first element.

        ``first`` is the warp's first row of A, or column of B. ``row`` and ``column`` are the lane's, from ``place``.
        """
        down, across = (uint32(run if which == operand else 0) for which, run in enumerate(self.runs))
        return lambda first, row, column: int32(first + row * down + column * across)

    def lanes(self, operand: int) -> int:
        """Threads that copy one row of a tile, each a vector."""
        return self.tile(operand)[1] // self.vector

    def copies(self, operand: int) -> tuple[int, ...]:
        """List the rows of a tile of which a thread copies a vector, relative to its first row, ``thread // lanes``.

        The vector begins at element ``thread % lanes * vector`` of the row.
        """
        shape, lanes = self.tile(operand), self.lanes(operand)
        if self.threads % lanes or shape[0] % (self.threads // lanes):
            raise ValueError(
                f"{self}: the vectors of a tile of {shape} cannot be divided evenly among {self.threads} threads"
            )
        return tuple(range(0, shape[0], self.threads // lanes))


TilingT = TypeVar("TilingT", bound=Tiling)

# For each type: the tiling for large products, then the one for small products.
#
# Large: a thread's part of C takes 128 registers. For int64 it takes fewer, since its multiplications need registers,
# too. A step is then 128 multiply-adds of reals for 6 vector loads from shared memory.
# Small: C has more tiles, so that more multiprocessors have work.
_FOUR_BYTES = (Tiling(128, 128, 16, 3, 8, 16, 4), Tiling(64, 64, 16, 3, 4, 8, 4, blocks=4))

TILINGS = {
    "float32": _FOUR_BYTES,
    "int32": _FOUR_BYTES,
    "float64": (Tiling(64, 128, 8, 3, 8, 8, 2), Tiling(32, 64, 8, 3, 4, 4, 2, blocks=4)),
    "int64": (Tiling(64, 64, 8, 3, 4, 4, 2), Tiling(32, 32, 8, 3, 4, 2, 2, blocks=4)),
}

# Time of the small tiling, relative to the large one, for the same work with all multiprocessors busy.
SMALL_COST = 1.25


def tiling_for(tilings: tuple[TilingT, TilingT], m: int, n: int, batch: int, multiprocessors: int) -> TilingT:
    """Choose the large or the small tiling for a product by the time of the multiprocessor with the most work."""

    def time(tiling: TilingT) -> float:
        tiles = batch * -(-m // tiling.rows) * -(-n // tiling.columns)
        cost = 1.0 if tiling is tilings[0] else SMALL_COST
        return cost * -(-tiles // multiprocessors) * tiling.rows * tiling.columns

    return min(tilings, key=time)

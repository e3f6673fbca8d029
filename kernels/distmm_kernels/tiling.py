"""Who owns what in the register-tiled kernel: index arithmetic only, no device and no Numba.

A thread block owns a tile of C, a warp a part of it, a thread ``thread_rows x thread_columns`` elements. Along k the
block brings in ``depth`` steps of A and B at a time, both with k first. Every offset that follows from this is a
constant of the compiled kernel, and is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["TILINGS", "WARP", "Tiling", "lane_place", "tiling_for"]

# Threads of a warp along the rows and along the columns of its part of C.
WARP = (4, 8)

Offsets: TypeAlias = tuple[tuple[int, int], ...]


def lane_place(lane):  # type: ignore[no-untyped-def]  # Python's int or Numba's
    """Row and column of a lane among the ``WARP`` of its warp.

    A load of 16 bytes is served half a warp at a time, in one pass if lanes that differ in one of their two lowest bits
    ask for the same address, in two if not. So one of these bits counts rows and one columns: both A and B are read in
    the two passes that 16 vectors need at least.
    """
    return lane >> 4 << 1 | lane >> 1 & 1, (lane >> 2 & 3) << 1 | lane & 1


@dataclass(frozen=True)
class Tiling:
    """Sizes of one register-tiled kernel, in elements.

    Attributes
    ----------
    rows, columns
        Of the tile of C that a thread block owns.
    depth
        Steps along k that are brought in at once, as one stage.
    stages
        Places for tiles of A and B in shared memory: one is multiplied, the others are on their way.
    thread_rows, thread_columns
        Elements of C that a thread holds in registers.
    vector
        Elements of one vector in shared memory, which every size above but ``depth`` is a multiple of.
    blocks
        Thread blocks that a multiprocessor must hold at once, which limits the registers of each thread.

    Raises
    ------
    ValueError
        If the sizes do not go together.
    """

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
            ("rows", self.rows, WARP[0] * self.thread_rows),
            ("columns", self.columns, WARP[1] * self.thread_columns),
            ("depth", self.depth, 2),  # the two places for a step's operands in registers change turns
            ("thread_rows", self.thread_rows, self.vector),
            ("thread_columns", self.thread_columns, self.vector),
        ):
            if whole <= 0 or part <= 0 or whole % part:
                raise ValueError(f"{self}: {name} is {whole}, which must be a positive multiple of {part}")
        if self.stages < 2:
            raise ValueError(f"{self} has {self.stages} stages: one is multiplied while others fill, so give 2 or more")
        if self.threads > 1024:
            raise ValueError(f"{self} has {self.threads} threads a block, CUDA allows 1024: use larger thread tiles")
        for width in (self.rows, self.columns):
            self.copies(width)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows // self.thread_rows * (self.columns // self.thread_columns)

    @property
    def warp_rows(self) -> int:
        """Warps of a block along the rows of its tile."""
        return self.rows // (WARP[0] * self.thread_rows)

    @property
    def shared_elements(self) -> int:
        """Elements of all stages in shared memory."""
        return self.stages * self.depth * (self.rows + self.columns)

    def row_of(self, element: int) -> int:
        """Row of a thread's element ``0 ... thread_rows - 1``, from its first: vectors of the lanes alternate."""
        return element // self.vector * WARP[0] * self.vector + element % self.vector

    def column_of(self, element: int) -> int:
        """Column of a thread's element ``0 ... thread_columns - 1``, from the thread's first."""
        return element // self.vector * WARP[1] * self.vector + element % self.vector

    def outputs(self, width: int) -> Offsets:
        """``(row, column)`` of each vector of C of a thread, from the thread's first element, row by row."""
        return tuple(
            (self.row_of(i), self.column_of(j))
            for i in range(self.thread_rows)
            for j in range(0, self.thread_columns, width)
        )

    def lanes(self, width: int) -> int:
        """Threads side by side on one k of a tile that is ``width`` wide, each with a vector."""
        return width // self.vector

    def copies(self, width: int) -> tuple[int, ...]:
        """List the steps of k that a thread copies a vector of each, from its first, ``thread // lanes``.

        The vector begins at ``thread % lanes * vector`` of the tile's ``width``.
        """
        lanes = self.lanes(width)
        if self.threads % lanes or self.depth % (self.threads // lanes):
            shape = self.depth, width
            raise ValueError(f"{self}: {self.threads} threads cannot share a tile of {shape} out evenly in vectors")
        return tuple(range(0, self.depth, self.threads // lanes))


# For each type the tiling for large products, then the one for small ones.
#
# Large: 128 registers of a thread hold its part of C, in every type but int64, whose products take registers of their
# own. A step is then 128 multiply-adds of reals for 6 vector loads from shared memory.
# Small: more blocks of C, so that more multiprocessors have one.
_FOUR_BYTES = (Tiling(128, 128, 16, 3, 8, 16, 4), Tiling(64, 64, 16, 3, 4, 8, 4, blocks=4))

TILINGS = {
    "float32": _FOUR_BYTES,
    "int32": _FOUR_BYTES,
    "float64": (Tiling(64, 128, 8, 3, 8, 8, 2), Tiling(32, 64, 8, 3, 4, 4, 2, blocks=4)),
    "int64": (Tiling(64, 64, 8, 3, 4, 4, 2), Tiling(32, 32, 8, 3, 4, 2, 2, blocks=4)),
    "complex64": (Tiling(128, 64, 8, 3, 8, 8, 2), Tiling(32, 64, 8, 3, 4, 4, 2, blocks=4)),
    "complex128": (Tiling(64, 64, 8, 2, 4, 8, 1), Tiling(32, 32, 8, 3, 4, 2, 1, blocks=4)),
}

# Time of a small tiling for as much work as a large one does, where both keep all multiprocessors busy.
SMALL_COST = 1.25


def tiling_for(m: int, n: int, batch: int, dtype: str, multiprocessors: int) -> Tiling:
    """Choose the tiling for a product by the time of the multiprocessor that has most to do."""

    def time(tiling: Tiling) -> float:
        tiles = batch * -(-m // tiling.rows) * -(-n // tiling.columns)
        cost = 1.0 if tiling is TILINGS[dtype][0] else SMALL_COST
        return cost * -(-tiles // multiprocessors) * tiling.rows * tiling.columns

    return min(TILINGS[dtype], key=time)

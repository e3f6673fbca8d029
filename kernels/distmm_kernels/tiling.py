"""Who owns what in the register-tiled kernel: index arithmetic only, no device and no Numba.

A thread block owns a tile of C, a warp a part of it, a thread ``thread_rows x thread_columns`` elements. Along k the
block brings in ``depth`` steps of A and B at a time. Every offset that follows from this is a constant of the compiled
kernel, and is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["TILINGS", "WARP", "Access", "Fetch", "Tiling", "access"]

# Threads of a warp along the rows and along the columns of its part of C. Its 4 vectors of A reach the lanes by
# broadcast and its 8 vectors of B, 16 bytes each, fill the 32 banks of shared memory exactly once.
WARP = (4, 8)

VECTOR_BYTES = 16  # the widest load of a thread
SECTOR_BYTES = 32  # what global memory delivers at least

# Elements between the end of one k of a tile in shared memory and the next: keeps vectors aligned, and sends the
# columns of a transposed store to different banks.
PADDING = 4

Offsets: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Access:
    """How a thread reads or writes a matrix: ``width`` neighbours at once, neighbouring threads along ``axis``."""

    axis: Literal[0, 1]
    width: int


@dataclass(frozen=True)
class Fetch:
    """How the threads of a block share a tile of A or B out among them.

    Attributes
    ----------
    access
        Axis 0 runs along the rows of the matrix, 1 along its columns.
    lanes
        Threads side by side along the axis; thread t starts at ``t % lanes * width`` on it, ``t // lanes`` across.
    offsets
        ``(row, column)`` of each vector of a thread, from where the thread starts.
    """

    access: Access
    lanes: int
    offsets: Offsets


@dataclass(frozen=True)
class Tiling:
    """Sizes of one register-tiled kernel, in elements.

    Attributes
    ----------
    rows, columns
        Of the tile of C that a thread block owns.
    depth
        Steps along k for which tiles of A and B lie in shared memory; there are two of each, one being filled.
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
    thread_rows: int
    thread_columns: int
    vector: int
    blocks: int = 2

    def __post_init__(self) -> None:
        for name, whole, part in (
            ("rows", self.rows, WARP[0] * self.thread_rows),
            ("columns", self.columns, WARP[1] * self.thread_columns),
            ("depth", self.depth, 2),  # A's next tile travels during the first half, B's during the second
            ("thread_rows", self.thread_rows, self.vector),
            ("thread_columns", self.thread_columns, self.vector),
            ("padding of shared memory", PADDING, self.vector),
        ):
            if whole <= 0 or part <= 0 or whole % part:
                raise ValueError(f"{self}: {name} is {whole}, which must be a positive multiple of {part}")
        if self.threads > 1024:
            raise ValueError(f"{self} has {self.threads} threads a block, CUDA allows 1024: use larger thread tiles")
        for width in (1, self.vector):
            for axis in (0, 1):
                self.fetch_a(Access(axis, width))
                self.fetch_b(Access(axis, width))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows // self.thread_rows * (self.columns // self.thread_columns)

    @property
    def warp_rows(self) -> int:
        """Warps of a block along the rows of its tile."""
        return self.rows // (WARP[0] * self.thread_rows)

    @property
    def pitch_a(self) -> int:
        """Elements from one k to the next in the tile of A, which lies in shared memory as (k, row)."""
        return self.rows + PADDING

    @property
    def pitch_b(self) -> int:
        """Elements from one k to the next in the tile of B, which lies in shared memory as (k, column)."""
        return self.columns + PADDING

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

    def fetch_a(self, access: Access) -> Fetch:
        """Share out a tile of A, ``(rows, depth)``."""
        return self._fetch((self.rows, self.depth), access, along_k=access.axis == 1)

    def fetch_b(self, access: Access) -> Fetch:
        """Share out a tile of B, ``(depth, columns)``."""
        return self._fetch((self.depth, self.columns), access, along_k=access.axis == 0)

    def _fetch(self, shape: tuple[int, int], access: Access, along_k: bool) -> Fetch:
        along, across = shape[access.axis], shape[1 - access.axis]
        # Along k a row of lanes reads one sector, so that the other lanes of the warp, on other rows, store to other
        # banks; all of them together must not need more rows than there are.
        sector = SECTOR_BYTES // VECTOR_BYTES * self.vector // access.width
        lanes = max(sector, self.threads // across) if along_k else along // access.width
        step_along, step_across = lanes * access.width, self.threads // max(1, lanes)
        if not step_along or not step_across or along % step_along or across % step_across or self.threads % lanes:
            raise ValueError(f"{self}: {self.threads} threads cannot share a tile of {shape} out evenly for {access}")
        offsets = [(i, j) for j in range(0, across, step_across) for i in range(0, along, step_along)]
        return Fetch(access, lanes, tuple((i, j) if access.axis == 0 else (j, i) for i, j in offsets))


# 128 registers of a thread hold its part of C, in every type but int64, whose products take registers of their own. A
# step is then 128 multiply-adds of reals for 6 vector loads from shared memory.
_FOUR_BYTES = Tiling(rows=128, columns=128, depth=8, thread_rows=8, thread_columns=16, vector=4)

TILINGS = {
    "float32": _FOUR_BYTES,
    "int32": _FOUR_BYTES,
    "float64": Tiling(rows=64, columns=128, depth=8, thread_rows=8, thread_columns=8, vector=2),
    "int64": Tiling(rows=64, columns=64, depth=8, thread_rows=4, thread_columns=4, vector=2),
    "complex64": Tiling(rows=128, columns=64, depth=8, thread_rows=8, thread_columns=8, vector=2),
    "complex128": Tiling(rows=64, columns=64, depth=8, thread_rows=4, thread_columns=8, vector=1),
}


def access(shape: Sequence[int], strides: Sequence[int], address: int, itemsize: int, vector: int) -> Access:
    """Find the widest access that a stack of matrices allows.

    Parameters
    ----------
    shape, strides
        Of ``(batch, rows, columns)``; strides in bytes, of any sign.
    address
        Of the first element.
    itemsize
        Bytes of an element.
    vector
        Elements of the widest access.

    Returns
    -------
    Access
        Along the axis with the smaller stride. It is ``vector`` wide if neighbours touch on that axis and every vector
        lies wholly inside the matrix and on a multiple of its own size; 1 wide otherwise.
    """
    axis: Literal[0, 1] = 1 if abs(strides[2]) <= abs(strides[1]) else 0
    aligned = (address, strides[0], strides[2 - axis])
    whole = strides[1 + axis] == itemsize and shape[1 + axis] % vector == 0
    return Access(axis, vector if whole and not any(number % (vector * itemsize) for number in aligned) else 1)

"""Tiles of the kernel that multiplies float64 with `mma.sync`: index arithmetic only, no device and no Numba.

One instruction multiplies 8 or 16 rows by 4 steps of k by 8 columns. It defines which lane holds which of its elements.
We choose which rows and columns of C its rows and columns are. Rows ``g`` and ``g + 8`` of an instruction are rows
``2 g`` and ``2 g + 1`` of C. Column ``g`` of two instructions is columns ``2 g`` and ``2 g + 1`` of C. So a lane loads
two consecutive elements of A or of B as 16 bytes, and owns 2 x 4 adjacent elements in each 16 x 16 of C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from numpy import int32, uint32

from distmm_kernels.tiles.tiling import Tiling

__all__ = ["LANES", "MmaTiling", "Product", "lane_place", "tilings"]

# Rows and columns of lanes in a warp. Lanes of one row hold different steps of k; lanes of one column hold different
# rows of A and columns of B.
LANES = (8, 4)


class Product(NamedTuple):
    """Indices of one instruction's registers among those of A, B and C, in the order of the instruction's operands."""

    a: tuple[int, ...]
    b: int
    c: tuple[int, ...]


def lane_place(lane):  # type: ignore[no-untyped-def]  # Python's int or Numba's
    """Row and column of a lane among the ``LANES`` of its warp."""
    return lane >> 2, lane & 3


@dataclass(frozen=True)
class MmaTiling(Tiling):
    """Sizes of one float64 `mma.sync` kernel, in elements.

    Attributes
    ----------
    along_k
        Whether A and B are k-major, in global memory and in shared memory.
    instruction_rows
        Rows of one `mma.sync`: 8, or 16 if the GPU has this instruction.
    """

    warp: ClassVar[tuple[int, int]] = LANES
    place: ClassVar[Any] = staticmethod(lane_place)

    along_k: tuple[bool, bool] = (False, False)
    instruction_rows: int = 8

    @property
    def step(self) -> int:
        """See `Tiling.step`."""
        return 4

    @property
    def runs(self) -> tuple[int, int]:
        """See `Tiling.runs`."""
        return 2, 4

    @property
    def operands(self) -> int:
        """See `Tiling.operands`."""
        return 2 * (self.thread_rows + self.thread_columns // 2)

    def pitch(self, operand: int) -> int:
        """Elements from a row of the tile in shared memory to the next.

        The pitch is the tile's columns and some padding. With it, lanes whose loads are served at the same time read
        from different banks. If the operand is not k-major, these are 8 lanes, which read 4 consecutive elements in
        each of 4 rows. If it is k-major, they are 16, which read 4 consecutive elements in every second of 8 rows.
        """
        return self.tile(operand)[1] + (2 if self.along_k[operand] else 4)

    def first_read(self, operand: int) -> Callable[[Any, Any, Any], Any]:
        """See `Tiling.first_read`. Adjacent lanes of a row read consecutive steps of k."""
        vector, (across, along) = uint32(self.vector), map(uint32, self.steps(operand))
        return lambda first, row, column: int32((first + row * vector) * across + column * along)

    def loads(self, operand: int) -> tuple[tuple[int, int, int], ...]:
        """List ``(register, place, count)`` of the vectors of A or B that a lane loads for a step.

        ``place`` is an offset in elements from the lane's `first_read`.
        """
        size, pitch = (self.thread_rows, self.thread_columns // 2)[operand], self.pitch(operand)
        if self.along_k[operand]:
            return tuple((i, (i // 2 * 16 + i % 2) * pitch, 1) for i in range(size))
        return tuple((i, i // 2 * 16, 2) for i in range(0, size, 2))

    def products(self) -> tuple[Product, ...]:
        """List the instructions of a step."""
        height = self.instruction_rows // 8
        return tuple(
            Product(
                tuple(range(i, i + height)),
                j,
                tuple(
                    row * self.thread_columns + j // 2 * 4 + j % 2 + e for row in range(i, i + height) for e in (0, 2)
                ),
            )
            for j in range(self.thread_columns // 2)
            for i in range(0, self.thread_rows, height)
        )


# GPUs on which a block may have more than 99 KB of shared memory. The same GPUs have float64 tensor cores.
ROOMY = ((8, 0), (9, 0), (10, 0))


def tilings(compute_capability: tuple[int, int] | None) -> tuple[MmaTiling, MmaTiling]:
    """Return the tiling for large products and the one for small products, on GPUs of this compute capability.

    Measured on an H200, operands that are not k-major, n = 4096 and 8192, TFLOP/s (cuBLAS: 58.9 and 60.2):

    - the large tiling: 56.9 and 57.9; with 4 stages of 8 steps: 56.1 and 57.2; the small tiling: 52.1 and 52.1;
    - warp tiles of 32 x 64: 54.9 and 54.1; of 32 x 32: 55.8 and 53.9 (the large tiling has 64 x 32);
    - two blocks of 128 x 64 on a multiprocessor: 54.9 and 54.0;
    - instructions of 8 rows: 31.0 and 30.4; of 16 rows and 8 steps of k: 52.5 and 52.6; of 16 rows and 16 steps: 55.5
      and 53.0.
    """
    depth = 16 if compute_capability in ROOMY else 8
    rows = 16 if compute_capability == (9, 0) else 8  # others lack the one of 16 rows, or execute it as two
    return (
        MmaTiling(128, 128, depth, 3, 8, 8, 2, blocks=1, instruction_rows=rows),
        MmaTiling(64, 64, depth, 3, 4, 8, 2, blocks=3, instruction_rows=rows),
    )

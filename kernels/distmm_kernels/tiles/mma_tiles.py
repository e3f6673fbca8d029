"""Which lane holds what where `mma.sync` multiplies float64: index arithmetic only, no device and no Numba.

With one instruction a warp multiplies 8 or 16 rows by 4 steps of k by 8 columns. The instruction says which lane holds
which element; we choose which rows and columns of C these are. Rows ``g`` and ``g + 8`` of an instruction are rows
``2 g`` and ``2 g + 1`` of C, and column ``g`` of two instructions is columns ``2 g`` and ``2 g + 1``. So a lane loads
two neighbours of A or of B as 16 bytes, and owns 2 x 4 neighbours in each 16 x 16 of C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from numpy import int32, uint32

from distmm_kernels.tiles.tiling import Tiling

__all__ = ["LANES", "MmaTiling", "Product", "lane_place", "tilings"]

# Lanes of a warp, as rows and columns. Lanes of a row hold steps of k, lanes of a column rows of A and columns of B.
LANES = (8, 4)


class Product(NamedTuple):
    """Registers of one instruction, in its own order, among those that hold A, B and C."""

    a: tuple[int, ...]
    b: int
    c: tuple[int, ...]


def lane_place(lane):  # type: ignore[no-untyped-def]  # Python's int or Numba's
    """Row and column of a lane among the ``LANES`` of its warp."""
    return lane >> 2, lane & 3


@dataclass(frozen=True)
class MmaTiling(Tiling):
    """Sizes of one such kernel, in elements.

    Attributes
    ----------
    along_k
        Whether A, and whether B, have k as their fast axis, in memory and in shared memory.
    instruction_rows
        Of one `mma.sync`: 8, or 16 where the GPU has such.
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

        A few more than the tile has columns, so that lanes whose loads are served together read from different banks.
        With k as slow axis these are 8 lanes, which read 4 neighbours in each of 4 rows. Along k they are 16, which
        read 4 neighbours in every second of 8 rows.
        """
        return self.tile(operand)[1] + (2 if self.along_k[operand] else 4)

    def first_read(self, operand: int) -> Callable[[Any, Any, Any], Any]:
        """See `Tiling.first_read`: lanes side by side read steps of k side by side."""
        vector, (across, along) = uint32(self.vector), map(uint32, self.steps(operand))
        return lambda first, row, column: int32((first + row * vector) * across + column * along)

    def loads(self, operand: int) -> tuple[tuple[int, int, int], ...]:
        """List ``(register, place, count)`` of a step's vectors of A or B.

        ``place`` counts from the element of the tile that the lane begins to read at.
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


# GPUs with more than 99 KB of shared memory a block, which are those with float64 tensor cores.
ROOMY = ((8, 0), (9, 0), (10, 0))


def tilings(compute_capability: tuple[int, int] | None) -> tuple[MmaTiling, MmaTiling]:
    """Return the tiling for large products on such a GPU, then the one for small ones.

    Measured on an H200, operands with k as slow axis, n = 4096 and 8192, TFLOP/s (cuBLAS: 58.9 and 60.2):

    - the large tiling 56.9 and 57.9, with 4 stages of 8 steps 56.1 and 57.2; the small one 52.1 and 52.1;
    - parts of a warp of 32 x 64 54.9 and 54.1, of 32 x 32 55.8 and 53.9, where the large tiling has 64 x 32;
    - two blocks of 128 x 64 a multiprocessor 54.9 and 54.0;
    - instructions of 8 rows 31.0 and 30.4, of 16 rows and 8 steps of k 52.5 and 52.6, of 16 steps 55.5 and 53.0.
    """
    depth = 16 if compute_capability in ROOMY else 8
    rows = 16 if compute_capability == (9, 0) else 8  # others have no such instruction, or make it of two
    return (
        MmaTiling(128, 128, depth, 3, 8, 8, 2, blocks=1, instruction_rows=rows),
        MmaTiling(64, 64, depth, 3, 4, 8, 2, blocks=3, instruction_rows=rows),
    )

"""Tiles of the kernel that multiplies float64 with `mma.sync`: index arithmetic only, no device and no Numba.

One instruction multiplies 8 or 16 rows by 4, 8 or 16 steps of k by 8 columns. It defines which lane holds which of its
elements. We choose which rows of C its rows are: rows ``g`` and ``g + 8`` of an instruction, or row ``g`` of two, are
rows ``2 g`` and ``2 g + 1`` of C. So a lane loads two consecutive elements of A as 16 bytes, in the order in which
instructions take them, and owns 2 x 2 adjacent elements in each 16 x 8 of C. A *fragment* of A has 16 rows, one of B 8
columns, and both have an instruction's steps of k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from numpy import int32, uint32

from distmm_kernels.tiles.tiling import Tiling

# Rows and columns of lanes in a warp. Lanes of one row hold different steps of k; lanes of one column hold different
# rows of A and columns of B.
LANES = (8, 4)


class Product(NamedTuple):
    """Indices of one instruction's registers among those of A, B and C, in the order of the instruction's operands."""

    a: tuple[int, ...]
    b: tuple[int, ...]
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
    instruction
        Rows and steps of k of one `mma.sync`: 8 and 4, or, on Hopper GPUs alone, 16 and 4, 8 or 16. Other GPUs lack the
        larger ones, or execute them as several.
    early
        Fragments of A that are multiplied as soon as all operands of a step are loaded, before the loads of the next
        step. In a stage's last step that is before the barrier.
    """

    warp: ClassVar[tuple[int, int]] = LANES
    place: ClassVar[Any] = staticmethod(lane_place)
    runs: ClassVar[tuple[int, int]] = (2, 2)
    sets: ClassVar[int] = 1  # a fragment is loaded for the next step as soon as it has been multiplied
    apart: ClassVar[tuple[int, int]] = (2, 1)  # rows of A, and columns of B, from a row of lanes to the next

    along_k: tuple[bool, bool] = (False, False)
    instruction: tuple[int, int] = (8, 4)
    early: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.early < self.fragments[0]:
            raise ValueError(
                f"{self}: early is {self.early}, which must be less than {self.fragments[0]} fragments of A"
            )

    @property
    def step(self) -> int:
        """See `Tiling.step`."""
        return self.instruction[1]

    @property
    def fragments(self) -> tuple[int, int]:
        """Number of fragments of A and of B that a warp multiplies in a step."""
        return self.thread_rows // 2, self.thread_columns // 2

    @property
    def operands(self) -> int:
        """See `Tiling.operands`."""
        return (self.thread_rows + self.thread_columns // 2) * self.step // 4

    def pitch(self, operand: int) -> int:
        """Elements from a row of the tile in shared memory to the next.

        The pitch is the tile's columns and some padding. With it, lanes whose loads are served at the same time read
        from different banks. In A these are 8 lanes, which read 4 consecutive elements in each of 4 rows, or, if A is
        k-major, 16 lanes, which read 4 consecutive elements in every second of 8 rows. In B they are 16 lanes, which
        read 4 consecutive elements in each of 4 rows.
        """
        return self.tile(operand)[1] + (2 if self.along_k[operand] and operand == 0 else 4)

    def first_read(self, operand: int) -> Callable[[Any, Any, Any], Any]:
        """See `Tiling.first_read`. Adjacent lanes of a row read consecutive steps of k."""
        apart, (across, along) = uint32(self.apart[operand]), map(uint32, self.steps(operand))
        return lambda first, row, column: int32((first + row * apart) * across + column * along)

    def loads(self, operand: int, number: int) -> tuple[tuple[int, int, int], ...]:
        """List ``(register, place, count)`` of the vectors of a fragment of A or of B that a lane loads for a step.

        ``place`` is an offset in elements from the lane's `first_read`.
        """
        across, along = self.steps(operand)
        fours = range(self.step // 4)  # a row of lanes holds 4 steps of k in one register
        if operand == 1:
            return tuple((self._register(1, number, q), number * 8 * across + 4 * q * along, 1) for q in fours)
        count = 1 if self.along_k[0] else 2
        return tuple(
            (self._register(0, 2 * number + e, q), (number * 16 + e) * across + 4 * q * along, count)
            for q in fours
            for e in range(0, 2, count)
        )

    def _register(self, operand: int, line: int, four: int) -> int:
        """Return the register of a lane's row of A, or column of B, for the four steps of k with this number."""
        fours = self.step // 4
        return line * fours + four if operand else (line // 2 * fours + four) * 2 + line % 2

    def products(self, i: int, j: int) -> tuple[Product, ...]:
        """List the instructions that multiply fragment ``i`` of A by fragment ``j`` of B."""
        fours = range(self.step // 4)
        height = self.instruction[0] // 8
        return tuple(
            Product(
                tuple(self._register(0, row, q) for q in fours for row in range(first, first + height)),
                tuple(self._register(1, j, q) for q in fours),
                tuple(row * self.thread_columns + 2 * j + e for row in range(first, first + height) for e in (0, 1)),
            )
            for first in range(2 * i, 2 * i + 2, height)
        )


# GPUs on which a block may have more than 99 KB of shared memory. The same GPUs have float64 tensor cores.
ROOMY = ((8, 0), (9, 0), (10, 0))


def tilings(compute_capability: tuple[int, int] | None) -> tuple[MmaTiling, MmaTiling]:
    """Return the tiling for large products and the one for small products, on GPUs of this compute capability.

    Measured on an H200 on 2026-11-26, A k-major and B not, one product of 5632 x 8192 x 3072 (8 full waves of tiles)
    after a pause, relative to cuBLAS (63 TFLOP/s), and n = 8192 for 0.15 s (56 to 57):

    - the large tiling: 0.96 and 0.97; with 5 stages: 0.95 and 0.97; nothing early: 0.94 and 0.94; two fragments early:
      0.93 and 0.94;
    - instructions of 16 steps, one fragment early: 0.84 and 0.89; two: 0.95 and 0.96; three: 0.91 and 0.95;
    - instructions of 4 steps: 0.90 and 0.91; of 8 rows and 4 steps: 0.48 and 0.53;
    - two blocks of 128 x 64 on a multiprocessor: 0.87 and 0.87;
    - 4 to 33 rows of tiles in a group (`register_tiled.GROUP`): within 0.02, in no order.

    The small tiling at n = 1024 and 2048, for 0.15 s: 0.91 and 0.87; with instructions of 8 steps: 0.83 and 0.83; of 4
    steps: 0.87 and 0.82.
    """
    if compute_capability == (9, 0):
        return (
            MmaTiling(128, 128, 16, 4, 8, 8, 2, blocks=1, instruction=(16, 8), early=1),
            MmaTiling(64, 64, 16, 3, 4, 8, 2, blocks=3, instruction=(16, 16), early=1),
        )
    depth = 16 if compute_capability in ROOMY else 8
    return MmaTiling(128, 128, depth, 3, 8, 8, 2, blocks=1), MmaTiling(64, 64, depth, 3, 4, 8, 2, blocks=3)

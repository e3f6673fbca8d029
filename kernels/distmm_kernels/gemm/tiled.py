"""The textbook kernel, for GPUs before Ampere: tiles in shared memory, and one thread for each element of C."""

from __future__ import annotations

from typing import ClassVar

from distmm_kernels.candidate import ALL, Candidate
from distmm_kernels.config import TILE
from distmm_kernels.kernel import Array
from distmm_kernels.launch import launches as launch
from distmm_kernels.launch.binary import Recipe


class TiledKernel(launch.CudaKernel):
    """Tiles in shared memory, of operands as they are. It adds the steps of k one by one in ascending order.

    Attributes
    ----------
    maker
        Makes the source of a kernel ``(a, b, c, d)`` from a type and the tile. Each of its blocks owns one tile of C.
    tile
        Rows and columns of the tile; a block has a thread for each of its elements.
    """

    name = "tiled"
    maker: ClassVar[str] = "distmm_kernels.device_code.tiled:source"
    tile: ClassVar[int] = TILE

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        recipe, (m, n) = Recipe(self.maker, (self.dtype.name, self.tile)), d.shape[-2:]
        for each in launch.matrices(a, b, c, d):
            launch.enqueue(recipe, self.device, -(-m // self.tile) * -(-n // self.tile), *each)


TABLE = (
    Candidate(
        TiledKernel,
        f"{TILE} x {TILE} tiles in shared memory",
        ALL,
        "ieee",
        tile=(TILE, TILE),
        worth_it=frozenset({(7, 0), (7, 2), (7, 5)}),
    ),
)

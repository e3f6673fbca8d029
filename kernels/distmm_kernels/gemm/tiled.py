"""Tiles of A and B in shared memory, in Numba's CUDA Python: the textbook kernel."""

from __future__ import annotations

from distmm_kernels.candidate import ALL, Candidate
from distmm_kernels.config import TILE
from distmm_kernels.gemm.block_kernel import BlockKernel


class TiledKernel(BlockKernel):
    """Tiles in shared memory."""

    name = "tiled"


TABLE = (
    Candidate(
        TiledKernel,
        f"{TILE} x {TILE} tiles in shared memory",
        ALL,
        "ieee",
        tile=(TILE, TILE),
        # a thread loads one element of A and one of B for each tile along k
        loads=lambda problem: 2 * -(-problem.k // TILE),
    ),
)

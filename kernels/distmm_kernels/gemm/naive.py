"""One thread per element of C, in Numba's CUDA Python: the baseline of the ladder."""

from __future__ import annotations

from distmm_kernels.candidate import ALL, Candidate
from distmm_kernels.config import TILE
from distmm_kernels.gemm.block_kernel import BlockKernel


class NaiveKernel(BlockKernel):
    """All operands from global memory."""

    name = "naive"


TABLE = (
    Candidate(
        NaiveKernel, "one thread per element of C", ALL, "ieee", tile=(TILE, TILE), loads=lambda problem: 2 * problem.k
    ),
)

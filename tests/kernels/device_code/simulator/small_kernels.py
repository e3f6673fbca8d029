"""Kernels with small tiles: the simulator makes a Python thread of every CUDA thread, and 32 x 32 of them cost seconds.

Each case at 3 has its edges where the real tile has them at 32.
"""

from __future__ import annotations

import dataclasses

from distmm.bench.teaching_kernels import NaiveKernel
from distmm_kernels.gemm.dmma import DmmaKernel
from distmm_kernels.gemm.register_tiled import RegisterTiledKernel
from distmm_kernels.gemm.tiled import TiledKernel
from distmm_kernels.tiles.mma_tiles import MmaTiling
from distmm_kernels.tiles.tiling import Tiling

TILE = 3


class SmallNaive(NaiveKernel):
    tile = TILE


class SmallTiled(TiledKernel):
    tile = TILE


class SmallRegisterTiled(RegisterTiledKernel):
    """One warp, and vectors of two elements: of 16 bytes only for some types, which the simulator does not mind."""

    tiling = Tiling(rows=8, columns=16, depth=8, stages=3, thread_rows=2, thread_columns=2, vector=2)

    def _tilings(self, a, b):
        return self.tiling, self.tiling


class SmallDmma(DmmaKernel):
    """Two warps below each other, each with 16 x 16 of C."""

    tiling = MmaTiling(rows=32, columns=16, depth=8, stages=3, thread_rows=2, thread_columns=4, vector=2)

    def _tilings(self, a, b):
        chosen, _ = super()._tilings(a, b)
        return (dataclasses.replace(self.tiling, along_k=chosen.along_k),) * 2


class SmallTallDmma(SmallDmma):
    """Instructions of 16 rows and 8 steps of k."""

    tiling = dataclasses.replace(SmallDmma.tiling, instruction=(16, 8), depth=16)


class SmallDeepDmma(SmallDmma):
    """Instructions of 16 rows and 16 steps of k."""

    tiling = dataclasses.replace(SmallDmma.tiling, instruction=(16, 16), depth=16)

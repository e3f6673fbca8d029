"""Float64 on tensor cores, in ascending k: the bits of the register-tiled kernel at twice its rate."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from distmm_kernels.candidate import AMPERE, FAST_FLOAT64, Candidate
from distmm_kernels.gemm.register_tiled import RegisterTiledKernel
from distmm_kernels.kernel import Array
from distmm_kernels.layout.vectors import has_vectors, in_vectors
from distmm_kernels.tiles.mma_tiles import tilings
from distmm_kernels.tiles.tiling import Tiling


class DmmaKernel(RegisterTiledKernel):
    """Products of a warp's tiles by `mma.sync`. Its bits are those of one ascending chain of steps.

    Operands may be contiguous along either axis, so matrices in C and in Fortran order are read in place.
    """

    name = "dmma"
    maker: ClassVar[str] = "distmm_kernels.device_code.mma:source"

    def _left(self, a: Array) -> Array:
        return self._right(a)

    def _right(self, b: Array) -> Array:
        return b if has_vectors(b, -1) or has_vectors(b, -2) else in_vectors(b, self.device)

    def _tilings(self, a: Array, b: Array) -> tuple[Tiling, Tiling]:
        along_k = not has_vectors(a, -2), not has_vectors(b, -1)
        large, small = tilings(self.device.compute_capability)
        return dataclasses.replace(large, along_k=along_k), dataclasses.replace(small, along_k=along_k)


TABLE = (
    Candidate(
        DmmaKernel,
        "float64 tensor cores, in ascending k",
        frozenset({"float64"}),
        "ieee",
        tile=(128, 64),  # between the two tilings: with the small one, the expected time of thin products is too short
        capabilities=AMPERE,
        worth_it=FAST_FLOAT64,
        unit="fp64_tensor",
        in_place="AB",
        prepared=1.0,  # copies of operands whose rows do not begin at multiples of 16 bytes
    ),
)

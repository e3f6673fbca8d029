"""float32 products of halves, as in `emulated`, by the `mma.sync` kernel: on tensor cores of any GPU since Ampere."""

from __future__ import annotations

from typing import Any

from distmm_kernels.candidate import AMPERE, FAST_TENSOR_CORES
from distmm_kernels.emulation.splits import Parts
from distmm_kernels.gemm.emulated import FLOAT16_HALVES, Fp16x3Kernel, Halves
from distmm_kernels.gemm.mma_sync import fragment_loads
from distmm_kernels.launch.fragment_launch import FragmentGemm, halves_gemm
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.fragment_tiles import tilings_of_halves


class MmaSyncFp16x3Kernel(Fp16x3Kernel):
    """Halves in float16, if the operands allow them."""

    name = "mma_sync_fp16x3"
    finishes = mirrors = False

    def _gemm(self, a: Parts, b: Parts, to: Stack, **variant: Any) -> FragmentGemm:
        return halves_gemm("float16" if a.format.scaled else "tfloat32", (a.k_major, b.k_major), self.device)


TABLE = (
    Halves(
        MmaSyncFp16x3Kernel,
        "three products of scaled float16 halves, on tensor cores fed by ldmatrix",
        tile=(64, 64),
        loads=lambda problem: fragment_loads(tilings_of_halves("float16", (9, 0), (True, True))[0], problem),
        capabilities=AMPERE,
        worth_it=FAST_TENSOR_CORES,
        unit="mma_sync",
        prepared=FLOAT16_HALVES,
    ),
)

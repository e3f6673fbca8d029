"""The product as a generalised ufunc: ``(k),(k,n),(n)->(n)``, one row of C from one row of A and the whole of B.

Numba generates the loop over rows and gives each row to one thread. The code takes four lines. It is slow, since m
threads cannot fill a GPU, and neighbouring threads write to different rows.
"""

from __future__ import annotations

from distmm_kernels.candidate import ALL, Candidate
from distmm_kernels.config import TILE
from distmm_kernels.gemm.block_kernel import current_stream, stacks, view
from distmm_kernels.kernel import Array
from distmm_kernels.launch.launches import CudaKernel


class GuvectorizedKernel(CudaKernel):
    """One thread per row of C."""

    name = "guvectorized"

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        from distmm_kernels.device_code.guvectorized import compiled

        rows_times_b = compiled(self.dtype, self.device.compute_capability)
        stream = current_stream()
        for stack in stacks(a, b, c, d):
            for operands in zip(*stack, strict=True):
                rows_times_b(*map(view, operands), stream=stream)


TABLE = (
    Candidate(
        GuvectorizedKernel,
        "Numba's generalised ufunc, one thread per row of C",
        ALL,
        "ieee",
        tile=(TILE, TILE),
        loads=lambda problem: 2 * problem.k,
    ),
)

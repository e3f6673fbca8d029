"""The teaching kernels, which only the ladder has: `naive`, its baseline, and `guvectorized`, which Numba launches."""

from __future__ import annotations

import numpy as np

from distmm_kernels.candidate import ALL, Candidate
from distmm_kernels.gemm.tiled import TiledKernel
from distmm_kernels.kernel import Array
from distmm_kernels.launch.launches import CudaKernel


class NaiveKernel(TiledKernel):
    """One thread for each element of C: all operands from global memory."""

    name = "naive"
    maker = "distmm_kernels.device_code.naive:source"


class GuvectorizedKernel(CudaKernel):
    """The product as a generalised ufunc: ``(k),(k,n),(n)->(n)``, one row of C from one row of A and the whole of B.

    Numba generates the loop over rows and gives each row to one thread. The code takes four lines. It is slow, since m
    threads cannot fill a GPU, and neighbouring threads write to different rows.
    """

    name = "guvectorized"

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        from distmm_kernels.device_code.emit import cuda
        from distmm_kernels.device_code.guvectorized import compiled

        rows_times_b, batch = compiled(self.dtype, self.device.compute_capability), d.shape[:-2]
        address = self._module.cuda.get_current_stream().ptr
        stream = cuda.external_stream(address) if address else cuda.default_stream()
        begun = np.zeros_like(d, shape=()) if c is None else c
        # NumPy dispatches CuPy's arrays to CuPy
        operands = [np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b)]
        arrays = *operands, np.broadcast_to(begun, d.shape), d
        for index in np.ndindex(batch):
            rows_times_b(*(cuda.as_cuda_array(x[index], sync=False) for x in arrays), stream=stream)


TEACHING = (
    Candidate(NaiveKernel, "one thread per element of C", ALL, "ieee", loads=lambda problem: 2 * problem.k),
    Candidate(
        GuvectorizedKernel,
        "Numba's generalised ufunc, one thread per row of C",
        ALL,
        "ieee",
        loads=lambda problem: 2 * problem.k,
    ),
)

"""The teaching kernels, which only the ladder has: `naive`, its baseline, and `guvectorized`, which Numba launches.

Machine code of `naive` is kept on disk by the sources of `distmm_kernels`, which do not have this file: whoever changes
it empties the folder of ``DISTMM_CACHE_DIR``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from distmm_kernels.candidate import ALL, Candidate
from distmm_kernels.device_code.arithmetic import multiply_add
from distmm_kernels.device_code.emit import cuda, from_dtype, guvectorize, types
from distmm_kernels.device_code.tiled import source_of
from distmm_kernels.gemm.tiled import TiledKernel
from distmm_kernels.kernel import Array
from distmm_kernels.launch.compiler import Source
from distmm_kernels.launch.launches import CudaKernel

__all__ = ["TEACHING", "GuvectorizedKernel", "NaiveKernel", "naive_source", "row_times_b"]


def naive(dtype: np.dtype[Any], tile: int) -> Callable[..., None]:
    """Make the kernel for a dtype; thread blocks compute ``tile`` x ``tile`` elements, numbered as in `tiled`.

    Neighbouring threads of a warp read neighbouring columns of B in one transaction and the same element of A by
    broadcast, so the caches hide much of what the count of loads suggests.
    """
    fma, zero = multiply_add(dtype), dtype.type(0)

    def kernel(a, b, c, d):
        columns = (d.shape[2] + tile - 1) // tile
        batch = cuda.blockIdx.y
        i = cuda.blockIdx.x // columns * tile + cuda.threadIdx.x // tile
        j = cuda.blockIdx.x % columns * tile + cuda.threadIdx.x % tile
        if i < d.shape[1] and j < d.shape[2]:
            acc = c[batch, i, j] if c.shape[0] > 0 else zero
            k = 0
            while k < a.shape[2]:  # 6 instructions a step; with `for k in range(...)` Numba's iterator makes it 19
                acc = fma(acc, a[batch, i, k], b[batch, k, j])
                k += 1
            d[batch, i, j] = acc

    return kernel


def naive_source(dtype: str, tile: int) -> Source:
    """Return the source that `distmm_kernels.launch.binary` compiles."""
    return source_of(naive(np.dtype(dtype), tile), dtype, tile)


class NaiveKernel(TiledKernel):
    """One thread for each element of C, with all operands from global memory: 2k loads for each element."""

    name = "naive"
    maker = f"{__name__}:naive_source"


def row_times_b(dtype: np.dtype[Any]) -> tuple[Callable[..., None], Any]:
    """Make the function ``(a, b, c, d)`` of a row of A, all of B, and rows of C and D; return it and its signature."""
    fma = multiply_add(dtype)
    vector, matrix = (types.Array(from_dtype(dtype), dimensions, "A") for dimensions in (1, 2))

    def multiply_row(a, b, c, d):
        for j in range(b.shape[1]):
            acc = c[j]
            k = 0
            while k < b.shape[0]:  # as in naive: a third of the instructions of `for k in range(...)`
                acc = fma(acc, a[k], b[k, j])
                k += 1
            d[j] = acc

    return multiply_row, types.void(vector, matrix, vector, vector)


@functools.cache
def _compiled(dtype: np.dtype[Any], compute_capability: tuple[int, int]) -> Callable[..., Any]:
    """Compile the ufunc for one type, once for each process and architecture."""
    del compute_capability  # a key of the cache; Numba compiles for the current device
    function, signature = row_times_b(dtype)
    return guvectorize([signature], "(k),(k,n),(n)->(n)", target="cuda")(function)


class GuvectorizedKernel(CudaKernel):
    """The product as a generalised ufunc: ``(k),(k,n),(n)->(n)``, one row of C from one row of A and the whole of B.

    Numba generates the loop over rows and gives each row to one thread. The code takes four lines. It is slow, since m
    threads cannot fill a GPU, and neighbouring threads write to different rows.
    """

    name = "guvectorized"

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        rows_times_b, batch = _compiled(self.dtype, self.device.compute_capability), d.shape[:-2]
        address = self._module.cuda.get_current_stream().ptr
        stream = cuda.external_stream(address) if address else cuda.default_stream()
        begun = np.zeros_like(d, shape=()) if c is None else c
        # NumPy dispatches CuPy's arrays to CuPy
        operands = [np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b)]
        arrays = *operands, np.broadcast_to(begun, d.shape), d
        for index in np.ndindex(batch):
            rows_times_b(*(cuda.as_cuda_array(x[index], sync=False) for x in arrays), stream=stream)


TEACHING = (
    Candidate(NaiveKernel, "one thread per element of C", ALL, "ieee"),
    Candidate(GuvectorizedKernel, "Numba's generalised ufunc, one thread per row of C", ALL, "ieee"),
)

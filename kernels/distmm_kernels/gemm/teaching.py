"""The teaching kernels, which Numba compiles and launches: `naive`, `tiled` and `guvectorized`.

A launch takes 0.2 ms of host time. `naive` is the baseline of the ladder, and `tiled` the textbook kernel, which GPUs
before Ampere use.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from distmm_kernels.candidate import ALL, Candidate
from distmm_kernels.config import TILE, Problem
from distmm_kernels.kernel import Array
from distmm_kernels.launch.launches import CudaKernel, matrices


class BlockKernel(CudaKernel):
    """A Numba kernel ``(a, b, c, d)`` on stacks of matrices in which one thread block owns one tile of C.

    A function of its name, in a file of its name in `distmm_kernels.device_code`, makes it from a type and the tile.

    Attributes
    ----------
    tile
        Rows and columns of the tile, which is also the shape of the thread block.
    """

    tile: ClassVar[int] = TILE

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        kernel = compiled(self.name, self.tile, self.dtype, self.device.compute_capability)
        stream = current_stream()
        for stack in stacks(a, b, c, d):
            blocks, threads = grid(stack[3].shape, self.tile)
            kernel[blocks, threads, stream](*map(view, stack))


class NaiveKernel(BlockKernel):
    """One thread for each element of C: all operands from global memory."""

    name = "naive"


class TiledKernel(BlockKernel):
    """Tiles of A and B in shared memory."""

    name = "tiled"


class GuvectorizedKernel(CudaKernel):
    """The product as a generalised ufunc: ``(k),(k,n),(n)->(n)``, one row of C from one row of A and the whole of B.

    Numba generates the loop over rows and gives each row to one thread. The code takes four lines. It is slow, since m
    threads cannot fill a GPU, and neighbouring threads write to different rows.
    """

    name = "guvectorized"

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        from distmm_kernels.device_code.guvectorized import compiled as ufunc

        rows_times_b, stream = ufunc(self.dtype, self.device.compute_capability), current_stream()
        for stack in stacks(a, b, c, d):
            for operands in zip(*stack, strict=True):
                rows_times_b(*map(view, operands), stream=stream)


def grid(shape: tuple[int, ...], tile: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Grid and block for a stack of C matrices ``(batch, m, n)``.

    ``blockIdx.x`` counts the tiles of one C in row-major order, since a tall C has more rows of tiles than
    ``gridDim.y`` may count; ``blockIdx.y`` is the matrix in the stack. ``threadIdx.x`` runs along a row of C.
    """
    batch, m, n = shape
    return (-(-m // tile) * -(-n // tile), batch), (tile, tile)


def stacks(a: Array, b: Array, c: Array | None, d: Array) -> Iterator[list[Array]]:
    """Cut batches as `matrices` does. One matrix becomes a stack of one, and a missing c a broadcast zero."""
    if c is None:
        c = np.broadcast_to(np.zeros_like(d, shape=()), d.shape)
    for stack in matrices(a, b, c, d):
        yield [array if array.ndim == 3 else array[None] for array in stack if array is not None]


@functools.cache
def compiled(name: str, tile: int, dtype: np.dtype[Any], compute_capability: tuple[int, int]) -> Any:
    """Compile a kernel for one type, once per process and architecture (about a second).

    All arguments are stacks of matrices with any strides, so the same machine code serves C and Fortran order,
    transposed and broadcast views. A dispatcher keys its machine code by argument types alone, so each architecture
    needs a dispatcher of its own.
    """
    from distmm_kernels.device_code.emit import cuda, from_dtype, types

    del compute_capability  # a key of the cache; Numba compiles for the current device
    stack = types.Array(from_dtype(dtype), 3, "A")
    function = getattr(importlib.import_module(f"distmm_kernels.device_code.{name}"), name)
    # no launch_bounds: they cost 15 % on an H200, and 1024 threads fit without them (tests check that)
    return cuda.jit(types.void(stack, stack, stack, stack))(function(dtype, tile))


def view(array: Array) -> Any:
    """Return Numba's view of a CuPy array. It does not synchronise, since the launch uses the same stream."""
    from distmm_kernels.device_code.emit import cuda

    return cuda.as_cuda_array(array, sync=False)


def current_stream() -> Any:
    """Return CuPy's current stream of this thread as a Numba stream."""
    import cupy

    from distmm_kernels.device_code.emit import cuda

    address = cupy.cuda.get_current_stream().ptr
    return cuda.external_stream(address) if address else cuda.default_stream()


BEFORE_AMPERE = frozenset({(7, 0), (7, 2), (7, 5)})


def _row(kernel: type[CudaKernel], idea: str, loads: Callable[[Problem], int]) -> Candidate:
    worth_it = BEFORE_AMPERE if kernel is TiledKernel else frozenset()
    return Candidate(kernel, idea, ALL, "ieee", tile=(TILE, TILE), loads=loads, worth_it=worth_it)


TABLE = (
    _row(NaiveKernel, "one thread per element of C", lambda problem: 2 * problem.k),
    # a thread loads one element of A and one of B for each tile along k
    _row(TiledKernel, f"{TILE} x {TILE} tiles in shared memory", lambda problem: 2 * -(-problem.k // TILE)),
    _row(GuvectorizedKernel, "Numba's generalised ufunc, one thread per row of C", lambda problem: 2 * problem.k),
)

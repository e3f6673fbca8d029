"""Host side of every CUDA kernel: memory, streams, the grid, compilation. A kernel's own file holds its idea only.

CuPy owns memory and streams. A Numba kernel runs on CuPy's current stream of the calling thread, and waits for that
stream alone: other work on the device goes on.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
from numba import config, cuda, from_dtype, types

from distmm_kernels.config import TILE
from distmm_kernels.kernel import Array, Kernel

__all__ = [
    "BlockKernel",
    "CudaKernel",
    "Source",
    "address",
    "compiled",
    "current_stream",
    "grid",
    "matrices",
    "view",
    "zero_if_none",
]

Source = Callable[[np.dtype[Any], int], Callable[..., None]]

# Numba warns of any grid under 128 blocks. Ragged last blocks are small on purpose, and where warnings are errors the
# product would fail for it.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0

MAX_GRID_Y = 65535  # CUDA's limit for gridDim.y and .z; gridDim.x goes to 2^31 - 1, which no C in memory exceeds


class CudaKernel(Kernel):
    """A kernel whose operands and results are CuPy arrays."""

    device_kind = "cuda"

    @property
    def _module(self) -> Any:
        import cupy

        return cupy

    def _to_device(self, block: Array) -> Array:
        cupy = self._module
        if isinstance(block, cupy.ndarray):
            # a copy goes to the current device, over NVLink or PCIe
            return block if block.device.id == self.device.index else block.copy()
        block = np.asarray(block)
        if not block.dtype.isnative:  # big-endian files: CuPy has native types only
            block = block.astype(block.dtype.newbyteorder("="))
        return cupy.asarray(block)

    def _on_device(self) -> Any:
        return self._module.cuda.Device(self.device.index)

    def _complete(self) -> None:
        self._module.cuda.get_current_stream().synchronize()


class BlockKernel(CudaKernel):
    """A Numba kernel ``(a, b, c, d)`` on stacks of matrices in which one thread block owns one tile of C.

    Attributes
    ----------
    tile
        Rows and columns of the tile, which is also the shape of the thread block.
    """

    tile: ClassVar[int] = TILE

    @property
    @abstractmethod
    def source(self) -> Source:
        """Makes the kernel's function, in Numba's language, from a dtype and the tile."""

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        kernel = compiled(self.source, self.tile, self.dtype, self.device.compute_capability)
        stream = current_stream()
        for stack in matrices(a, b, zero_if_none(c, d), d):
            blocks, threads = grid(stack[3].shape, self.tile)
            kernel[blocks, threads, stream](*map(view, stack))


def grid(shape: tuple[int, ...], tile: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Grid and block for a stack of C matrices ``(batch, m, n)``.

    ``blockIdx.x`` counts the tiles of one C in row-major order, since a tall C has more rows of tiles than
    ``gridDim.y`` may count; ``blockIdx.y`` is the matrix in the stack. ``threadIdx.x`` runs along a row of C.
    """
    batch, m, n = shape
    return (-(-m // tile) * -(-n // tile), batch), (tile, tile)


def matrices(a: Array, b: Array, c: Array, d: Array) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Cut broadcasting batches into stacks ``(batch, rows, columns)`` that one launch takes, without a copy."""
    batch = d.shape[:-2]
    if not batch:
        yield a[None], b[None], c[None], d[None]
        return
    # numpy's function hands CuPy arrays on to CuPy's
    a, b = (np.broadcast_to(operand, (*batch, *operand.shape[-2:])) for operand in (a, b))
    for index in np.ndindex(batch[:-1]):
        for first in range(0, batch[-1], MAX_GRID_Y):
            part = (*index, slice(first, first + MAX_GRID_Y))
            yield a[part], b[part], c[part], d[part]


def zero_if_none(c: Array | None, d: Array) -> Array:
    """Return ``c``, or one zero seen with stride 0 as a whole array like ``d``."""
    return np.broadcast_to(np.zeros_like(d, shape=()), d.shape) if c is None else c


@functools.cache
def compiled(
    source: Source,
    tile: int,
    dtype: np.dtype[Any],
    compute_capability: tuple[int, int],
) -> Any:
    """Compile a kernel for one type, once a process and architecture (about a second).

    All arguments are stacks of matrices with any strides: one machine code serves C and Fortran order, transposed
    and broadcast views. A dispatcher keys its machine code by argument types alone, hence one for each architecture.
    """
    del compute_capability  # a key of the cache; Numba compiles for the current device
    stack = types.Array(from_dtype(dtype), 3, "A")
    # no launch_bounds: they cost 15 % on an H200, and the tests see that 1024 threads fit without
    return cuda.jit(types.void(stack, stack, stack, stack))(source(dtype, tile))


def view(array: Array) -> Any:
    """Return Numba's view of a CuPy array, without the wait for its stream: the launch is on that stream."""
    return cuda.as_cuda_array(array, sync=False)


def address(array: Any) -> int:
    """Return where the first element of Numba's view lies."""
    return int(array.__cuda_array_interface__["data"][0])


def current_stream() -> Any:
    """Return CuPy's current stream of this thread, as Numba's."""
    import cupy

    address = cupy.cuda.get_current_stream().ptr
    return cuda.external_stream(address) if address else cuda.default_stream()

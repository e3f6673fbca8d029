"""Host side of every CUDA kernel: memory, streams, batches, the launch. A kernel's own file holds its idea only.

CuPy owns memory and streams. A kernel runs on CuPy's current stream of the calling thread, and waits for that stream
alone: other work on the device goes on. Nothing here imports Numba, which takes longer than many a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from distmm_kernels import driver
from distmm_kernels.binary import Recipe
from distmm_kernels.device import Device
from distmm_kernels.kernel import Array, Kernel

__all__ = ["CudaKernel", "Launch", "address", "matrices"]

MAX_GRID_Y = 65535  # CUDA's limit for gridDim.y and .z; gridDim.x goes to 2^31 - 1, which no C in memory exceeds

NO_MATRICES = (0,) * 11  # a stack of none, as `driver.array_arguments` would give it
ADDRESS = 4  # where the address stands there


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


class Launch:
    """A launch of a kernel on stacks of matrices of given shapes and strides: only their addresses are still to come.

    Parameters
    ----------
    blocks
        Along the grid's first two axes.
    arrays
        Stacks ``(batch, rows, columns)`` as the kernel will be given them; one matrix alone is a stack of one, and None
        a stack of none.
    """

    def __init__(self, recipe: Recipe, device: Device, blocks: tuple[int, int], arrays: Sequence[Array | None]) -> None:
        self._kernel, self._grid = driver.loaded(recipe, device), (*blocks, 1)
        stacks = [x if x is None or x.ndim == 3 else x[None] for x in arrays]
        self._values = [value for x in stacks for value in (NO_MATRICES if x is None else driver.array_arguments(x))]

    def __call__(self, *arrays: Array | None) -> None:
        """Enqueue it on CuPy's current stream, on arrays of these shapes and strides."""
        values = self._values.copy()
        for number, array in enumerate(arrays):
            if array is not None:
                values[number * len(NO_MATRICES) + ADDRESS] = address(array)
        self._kernel.launch(self._grid, (), tuple(values))


def matrices(a: Array, b: Array, c: Array | None, d: Array) -> Iterator[tuple[Array, Array, Array | None, Array]]:
    """Cut broadcasting batches into stacks ``(batch, rows, columns)`` that one launch takes, without a copy.

    Matrices without batch dimensions are given back as they are.
    """
    batch = d.shape[:-2]
    if not batch:
        yield a, b, c, d
        return
    # numpy's function hands CuPy arrays on to CuPy's
    a, b = (np.broadcast_to(operand, (*batch, *operand.shape[-2:])) for operand in (a, b))
    for index in np.ndindex(batch[:-1]):
        for first in range(0, batch[-1], MAX_GRID_Y):
            part = (*index, slice(first, first + MAX_GRID_Y))
            yield a[part], b[part], None if c is None else c[part], d[part]


def address(array: Array) -> int:
    """Return where the first element lies."""
    return int(array.data.ptr)

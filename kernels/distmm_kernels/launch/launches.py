"""The host side that all CUDA kernels share: memory, streams, batches, launches.

CuPy owns memory and streams. A kernel runs on CuPy's current stream of the calling thread and waits for that stream
only, so other work on the device goes on. Nothing here imports Numba, since that takes longer than many products.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from distmm_kernels.device import Device
from distmm_kernels.kernel import Array, Kernel
from distmm_kernels.launch import driver
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.layout.stack import Stack

__all__ = ["CudaKernel", "Launch", "matrices"]

MAX_GRID_Y = 65535  # CUDA's limit for gridDim.y and .z; gridDim.x goes to 2^31 - 1, which no C in memory exceeds

NO_MATRICES = (0,) * 11  # a stack of none, as `driver.array_arguments` would give it
ADDRESS = 4  # where the address stands there


class CudaKernel(Kernel):
    """A kernel whose operands and results are CuPy arrays."""

    device_kind = "cuda"

    @functools.cached_property
    def _module(self) -> Any:
        import cupy

        return cupy

    def _to_device(self, block: Array) -> Array:
        cupy = self._module
        if isinstance(block, cupy.ndarray):
            # a copy goes to the current device, over NVLink or PCIe
            return block if block.data.device_id == self.device.index else block.copy()
        block = np.asarray(block)
        if not block.dtype.isnative:  # big-endian files: CuPy has native types only
            block = block.astype(block.dtype.newbyteorder("="))
        return cupy.asarray(block)

    def _on_device(self) -> Any:
        return self._module.cuda.Device(self.device.index)

    def _complete(self) -> None:
        self._module.cuda.get_current_stream().synchronize()


class Launch:
    """A launch of a kernel on stacks of given shapes and strides; each call gives their addresses.

    Parameters
    ----------
    blocks
        Along the grid's first two axes.
    stacks
        As the kernel will be given them, at any address; None is a stack of none.
    """

    def __init__(self, recipe: Recipe, device: Device, blocks: tuple[int, int], stacks: Sequence[Stack | None]) -> None:
        self._kernel, self._grid = driver.loaded(recipe, device), (*blocks, 1)
        arguments = [NO_MATRICES if x is None else driver.array_arguments(0, *x[1:]) for x in stacks]
        self._values = [value for each in arguments for value in each]

    def __call__(self, *addresses: int) -> None:
        """Enqueue it on CuPy's current stream, on stacks at these addresses: 0 for a stack of none."""
        values = self._values.copy()
        values[ADDRESS :: len(NO_MATRICES)] = addresses
        self._kernel.launch(self._grid, (), values)


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

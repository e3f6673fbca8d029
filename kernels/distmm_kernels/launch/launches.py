"""Host code that all CUDA kernels share: memory, streams, batches, launches.

CuPy owns memory and streams. A kernel runs on the calling thread's current CuPy stream. The host waits for that stream
only, so work on other streams continues. Nothing here imports Numba, since that takes longer than many products.
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
from distmm_kernels.layout.copies import NUMBERS, TILE
from distmm_kernels.layout.float8 import carrier
from distmm_kernels.layout.stack import Stack
from distmm_kernels.symmetric import Symmetry

MAX_GRID_Y = 65535  # CUDA's limit for gridDim.y and .z; that of gridDim.x is 2^31 - 1, which no C in memory exceeds

NO_MATRICES = (0,) * 11  # the arguments of an absent stack, as many as `driver.array_arguments` returns
ADDRESS = 4  # index of the address in these arguments


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
            # `copy` copies to the current device, over NVLink or PCIe
            return block if block.data.device_id == self.device.index else block.copy()
        block = np.asarray(block)
        if not block.dtype.isnative:  # from big-endian files; CuPy has native types only
            block = block.astype(block.dtype.newbyteorder("="))
        return cupy.asarray(block.view(carrier(block.dtype)))

    def _on_device(self) -> Any:
        return self._module.cuda.Device(self.device.index)

    def _complete(self) -> None:
        self._module.cuda.get_current_stream().synchronize()

    def _mirror(self, d: Array, symmetry: Symmetry) -> None:
        hermitian, tiles = symmetry == "hermitian" and d.dtype.kind == "c", -(-d.shape[-1] // TILE)
        number = d.dtype.name if hermitian else NUMBERS[d.itemsize]
        recipe = Recipe("distmm_kernels.device_code.copies.mirror:source", (number, hermitian))
        for (part,) in matrices(d) if d.size else ():
            enqueue(recipe, self.device, tiles * (tiles + 1) // 2, part)


class Launch:
    """A launch of a kernel on stacks of given shapes and strides; each call gives their addresses.

    Parameters
    ----------
    blocks
        Thread blocks along the grid's first two axes.
    stacks
        The kernel's arguments; their addresses are not used. None: the kernel gets an empty stack.
    """

    def __init__(self, recipe: Recipe, device: Device, blocks: tuple[int, int], stacks: Sequence[Stack | None]) -> None:
        self._kernel, self._grid = driver.loaded(recipe, device), (*blocks, 1)
        arguments = [NO_MATRICES if x is None else driver.array_arguments(0, *x[1:]) for x in stacks]
        self._values = [value for each in arguments for value in each]

    def __call__(self, *addresses: int) -> None:
        """Enqueue the kernel on CuPy's current stream, for stacks at these addresses; 0 where the stack is None."""
        values = self._values.copy()
        values[ADDRESS :: len(NO_MATRICES)] = addresses
        self._kernel.launch(self._grid, values)


def enqueue(recipe: Recipe, device: Device, blocks: int, *arrays: Array | None) -> None:
    """Enqueue a kernel on stacks, or single matrices, with ``blocks`` thread blocks for each matrix of the last one."""
    stacks = [None if x is None else Stack.of(x) for x in arrays]
    grid = blocks, stacks[-1].matrices  # type: ignore[union-attr]  # the last one is an array
    Launch(recipe, device, grid, stacks)(*(0 if x is None else x.address for x in stacks))


def matrices(*arrays: Array | None) -> Iterator[tuple[Any, ...]]:
    """Cut batches into stacks ``(batch, rows, columns)`` for one launch each, without a copy.

    The last array has the batch of all of them, to which the others are broadcast. None stays None. Matrices without
    batch dimensions are yielded unchanged.
    """
    batch = arrays[-1].shape[:-2]  # type: ignore[union-attr]  # the last one is an array
    if not batch:
        yield arrays
        return
    # NumPy dispatches CuPy's arrays to CuPy
    whole = [x if x is None else np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in arrays[:-1]]
    for index in np.ndindex(batch[:-1]):
        for first in range(0, batch[-1], MAX_GRID_Y):
            part = (*index, slice(first, first + MAX_GRID_Y))
            yield tuple(x if x is None else x[part] for x in (*whole, arrays[-1]))

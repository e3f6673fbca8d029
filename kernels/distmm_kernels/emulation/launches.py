"""What all splits of operands have in common: their launches, and the guards that the kernels raise."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from distmm_kernels.emulation.formats import Guard
from distmm_kernels.launch.driver import LoadedKernel
from distmm_kernels.launch.launches import MAX_GRID_Y

Array = Any  # cupy.ndarray: CuPy ships no types

ALIGNMENT = 256  # bytes; alignment of the arrays in one allocation
GUARDS, NO_GUARD = len(Guard), Guard(0)


class Plan(NamedTuple):
    """The launches that split stacks of one shape, strides and alignment.

    Attributes
    ----------
    layout
        Memory layout of the result, of ``layout.end`` bytes.
    launches
        Kernels, and the first two sizes of their grids. The third one counts matrices.
    numbers
        The kernels' arguments between the addresses and the first matrix.
    zeros
        Offset and number of bytes that must be set to 0 before the launches.
    """

    layout: Any
    launches: tuple[tuple[LoadedKernel, tuple[int, int]], ...]
    numbers: tuple[int, ...]
    zeros: tuple[int, int] = (0, 0)

    def enqueue(self, batch: int, address: int, *further: int) -> Any:
        """Enqueue the launches for a stack of ``batch`` matrices at an address. Return the memory of the result.

        ``further`` are the addresses that the kernels take after those of the stack and of the result.
        """
        import cupy

        memory, stream = cupy.cuda.alloc(self.layout.end), cupy.cuda.get_current_stream().ptr
        if self.zeros[1]:
            cupy.cuda.runtime.memsetAsync(memory.ptr + self.zeros[0], 0, self.zeros[1], stream)
        for first in range(0, batch, MAX_GRID_Y):
            values = (address, memory.ptr, *further, *self.numbers, first)
            for kernel, grid in self.launches:
                kernel.launch((*grid, min(batch - first, MAX_GRID_Y)), values, stream)
        return memory


class Found:
    """The guards that kernels raise for an operand. The device writes them into pinned host memory, without a copy."""

    def __init__(self, count: int) -> None:
        import cupy

        self._guards: tuple[Guard, ...] | None = None
        self._done = cupy.cuda.Event(disable_timing=True)  # first: it is there to wait for if there is no memory
        self._memory = cupy.cuda.alloc_pinned_memory(4 * GUARDS * max(count, 1))
        self._flags = np.frombuffer(self._memory, np.uint32, GUARDS * count)
        self._flags[...] = 0
        self.address = int(self._memory.ptr)

    def __del__(self) -> None:
        # the memory may be reused after this: wait until the device has written to it for the last time
        if self._guards is None:
            self._done.synchronize()

    def record(self) -> None:
        """Record an event after all kernels that may raise guards. Call this when they are enqueued."""
        self._done.record()

    @property
    def here(self) -> bool:
        """Whether the kernels have finished, so that `guards` returns without waiting for the device."""
        return self._guards is not None or bool(self._done.done)

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Guards of each granule. Unless `Guard.SPARSE` alone or no guard is raised, its parts are not valid."""
        if self._guards is None:
            self._done.synchronize()
            if not self._flags.any():
                self._guards = (NO_GUARD,) * (len(self._flags) // GUARDS)
                return self._guards
            flags = self._flags.tolist()
            granules = (zip(Guard, flags[i : i + GUARDS], strict=True) for i in range(0, len(flags), GUARDS))
            self._guards = tuple(Guard(sum(guard for guard, flag in each if flag)) for each in granules)
        return self._guards

    @property
    def raised(self) -> bool:
        """Whether any guard is raised."""
        return any(self.guards)


def as_stack(array: Array) -> Array:
    """Return matrices ``(*batch, rows, k)`` as a stack ``(batch, rows, k)``: a view, if strides allow.

    A single matrix ``(rows, k)`` is returned as it is.
    """
    return array if array.ndim < 4 else array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])

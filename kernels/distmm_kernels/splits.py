"""float32 operands in tensor cores' formats: which kernels split them, what results, and what was found on the way."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distmm_kernels.binary import Recipe
from distmm_kernels.device import Device
from distmm_kernels.driver import LoadedKernel, loaded
from distmm_kernels.formats import GRANULE, Format, Guard, granules, place, warps_of
from distmm_kernels.tensor_map import MatrixStack

__all__ = ["Found", "Parts", "Splitter", "as_stack", "splitter"]

Array = Any  # cupy.ndarray: CuPy ships no types

MAX_GRID_Z = 65535
PAST_THE_ROWS = 256  # a tile of the product may stick out so far, and still read scales
ALIGNMENT = 256  # bytes, of what shares one allocation
# What the kernels' blocks cover: `distmm_kernels.device_code.prepass` says why.
ROWS_BY_K = {"find_maxima": (128, 256), "split_columns": (128, 256), "split_transposed": (32, 64)}


@dataclass(frozen=True, eq=False)
class Parts:
    """A stack of matrices ``(batch, rows, k)``, A or B transposed, in a tensor core's format.

    Attributes
    ----------
    hi, lo
        Where the parts lie: ``(batch, rows, k)`` if ``k_major``, else ``(batch, k, rows)``, with padded rows. The same
        where the format has one part.
    scales, scales_step, scales_pitch
        Address of float32 powers of two that the product of each row is multiplied by, and `PAST_THE_ROWS` zeros; bytes
        from one matrix's to the next one's; words from one granule's to the next one's. 0 if the format has none.
    memory
        Owns all of it.
    """

    format: Format
    hi: MatrixStack
    lo: MatrixStack
    k_major: bool
    scales: int
    scales_step: int
    scales_pitch: int
    memory: Any

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self.memory.mem.size)

    def granule(self, index: int) -> Parts:
        """Return one granule as a stack of its own, without a copy."""
        first = index * GRANULE
        k = self.hi.columns if self.k_major else self.hi.rows
        length = min(GRANULE, k - first)
        if first == 0 and length == k:
            return self

        def cut(part: MatrixStack) -> MatrixStack:
            if self.k_major:
                return part._replace(address=part.address + first * self.format.dtype.itemsize, columns=length)
            return part._replace(address=part.address + first * part.pitch, rows=length)

        scales = self.scales + 4 * index * self.scales_pitch
        return replace(self, hi=cut(self.hi), lo=cut(self.lo), scales=scales)

    def array(self, part: MatrixStack) -> Array:
        """Return a part as a CuPy array."""
        import cupy

        strides = part.step, part.pitch, self.format.dtype.itemsize
        pointer = self.memory + (part.address - self.memory.ptr)
        return cupy.ndarray(part[1:4], self.format.dtype, pointer, strides)


class Found:
    """The guards of an operand, on their way from the device."""

    def __init__(self, count: int, flags: int | None) -> None:
        import cupy

        self._guards: tuple[Guard, ...] | None = (Guard(0),) * count if flags is None else None
        if flags is not None:
            stream = cupy.cuda.get_current_stream()
            self._host = cupy.cuda.alloc_pinned_memory(4 * count)
            self._words = np.frombuffer(self._host, np.uint32, count)
            cupy.cuda.runtime.memcpyAsync(
                self._host.ptr, flags, 4 * count, cupy.cuda.runtime.memcpyDeviceToHost, stream.ptr
            )
            self._arrived = stream.record(cupy.cuda.Event(disable_timing=True))

    @property
    def here(self) -> bool:
        """Whether `guards` would not wait for the device."""
        return self._guards is not None or bool(self._arrived.done)

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Guards of each granule: where one is raised, the parts are no numbers to compute with."""
        if self._guards is None:
            self._arrived.synchronize()
            self._guards = tuple(map(Guard, self._words.tolist()))
        return self._guards


class Splitter:
    """Splits operands into one format on one device."""

    def __init__(self, form: Format, device: Device) -> None:
        self.form, self.device = form, device
        self._kernels: dict[tuple[Any, ...], LoadedKernel] = {}

    def __call__(self, stack: Array) -> tuple[Parts, Found]:
        """Enqueue the splitting of a stack of float32 matrices ``(batch, rows, k)`` with any strides.

        It is read in place where its rows or its k are contiguous. The device must be current.
        """
        import cupy

        form, itemsize = self.form, self.form.dtype.itemsize
        placement = place(stack.shape, stack.strides, stack.data.ptr, 4)
        if placement.contiguous is None:
            stack = cupy.ascontiguousarray(stack)
            placement = place(stack.shape, stack.strides, stack.data.ptr, 4)
        by_rows = placement.contiguous == "k"
        batch, rows, k = stack.shape
        k_major = by_rows or form.along_k
        lines, line = (rows, k) if k_major else (k, rows)
        ld = -(-line // form.multiple) * form.multiple
        part_bytes = -(-batch * lines * ld * itemsize // ALIGNMENT) * ALIGNMENT
        # flags, then tables with a word for each row: scales, maxima, weights. All start from zero, in one go.
        count, pitch = granules(k), rows + PAST_THE_ROWS + -rows % 4
        tables = (1 if form.scaled else 0) if by_rows else (3 if form.scaled else 1 if form.guarded else 0)
        table_bytes = 4 * batch * count * pitch
        flag_bytes = 4 * (count + -count % 4)  # scales come in pairs
        memory = cupy.cuda.alloc(form.parts * part_bytes + flag_bytes + tables * table_bytes)
        hi, flags = memory.ptr, memory.ptr + form.parts * part_bytes
        lo, scales = hi + (form.parts - 1) * part_bytes, flags + flag_bytes
        empty = 0 in stack.shape
        if (tables or form.guarded) and not empty:
            stream = cupy.cuda.get_current_stream().ptr
            cupy.cuda.runtime.memsetAsync(flags, 0, flag_bytes + tables * table_bytes, stream)
        for first in range(0, 0 if empty else batch, MAX_GRID_Z):
            number = min(batch - first, MAX_GRID_Z)
            source = stack.data.ptr + first * stack.strides[0], stack.strides[0], stack.strides[2 if not by_rows else 1]
            at = [scales + i * table_bytes + 4 * first * count * pitch for i in range(3)]
            to = (hi + first * lines * ld * itemsize, lo + first * lines * ld * itemsize, ld)
            self._launch((*source, rows, k), number, at, pitch, to, flags, by_rows, placement.aligned)
        stacks = [MatrixStack(part, batch, lines, line, ld * itemsize, lines * ld * itemsize) for part in (hi, lo)]
        step = 4 * count * pitch
        scales, step, pitch = (scales, step, pitch) if form.scaled else (0, 0, 0)
        parts = Parts(form, stacks[0], stacks[1], k_major, scales, step, pitch, memory)
        return parts, Found(count, flags if form.guarded and not empty else None)

    def _launch(
        self,
        source: tuple[int, ...],
        batch: int,
        tables: list[int],
        pitch: int,
        to: tuple[int, int, int],
        flags: int,
        by_rows: bool,
        aligned: bool,
    ) -> None:
        *_, rows, k = source
        scales, maxima, weights = tables
        if by_rows:
            warps = warps_of(k)
            grid = -(-rows // (8 // warps)), granules(k), batch
            self._kernel("split_rows", self.form, aligned, warps).launch(grid, (), (*source, *to, scales, pitch, flags))
            return

        def over_columns(name: str, parameters: tuple[Any, ...], arguments: tuple[int, ...]) -> None:
            block_rows, block_k = ROWS_BY_K[name]
            grid = -(-rows // block_rows) * -(-k // block_k), 1, batch
            self._kernel(name, *parameters).launch(grid, (), (*source, *arguments))

        if self.form.scaled:
            over_columns("find_maxima", (aligned,), (maxima, pitch))
            over_columns("split_columns", (self.form, aligned), (maxima, weights, *to, scales, pitch, flags))
        else:
            over_columns("split_transposed", (self.form,), (scales, pitch, *to, flags))

    def _kernel(self, name: str, *parameters: Any) -> LoadedKernel:
        key = name, *(parameters[1:] if parameters[0] is self.form else parameters)
        if key not in self._kernels:
            recipe = Recipe(f"distmm_kernels.device_code.prepass:{name}", parameters)
            self._kernels[key] = loaded(recipe, self.device)
        return self._kernels[key]


@functools.cache
def splitter(form: Format, device: Device) -> Splitter:
    """Return the one splitter of a format on a device."""
    return Splitter(form, device)


def as_stack(array: Array) -> Array:
    """Return matrices ``(*batch, rows, k)`` as a stack ``(batch, rows, k)``: a view, where strides allow."""
    return array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])

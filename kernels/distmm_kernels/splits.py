"""float32 operands in tensor cores' formats: which kernels split them, what results, what was found on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distmm_kernels.binary import Recipe
from distmm_kernels.device import Device
from distmm_kernels.driver import LoadedKernel, loaded
from distmm_kernels.formats import GRANULE, Format, Guard, Placement, granules, place, warps_of

__all__ = ["Parts", "split"]

Array = Any  # cupy.ndarray: CuPy ships no types

MAX_GRID_Z = 65535
SCALES_PAST_END = 256  # a tile of the product may stick out so far


@dataclass(frozen=True)
class Parts:
    """A stack of matrices ``(batch, rows, k)``, A or B transposed, in a tensor core's format.

    Attributes
    ----------
    hi, lo
        ``(batch, rows, ld)`` if ``k_major``, else ``(batch, k, ld)``; rows of ``ld`` elements are aligned for the tensor
        memory accelerator, and what lies past their end is undefined. ``lo`` is None in a format of one part.
    scales
        ``(batch, granules, ...)`` float32: by what each row's products are multiplied; longer than the rows. None if the
        format has no scales.
    """

    format: Format
    shape: tuple[int, int, int]
    hi: Array
    lo: Array | None
    scales: Array | None
    k_major: bool

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(int(array.nbytes) for array in (self.hi, self.lo, self.scales) if array is not None)

    def granule(self, index: int) -> Parts:
        """Return one granule as a stack of its own, without a copy."""
        batch, rows, k = self.shape
        first = index * GRANULE
        last = min(first + GRANULE, k)

        def cut(part: Array | None) -> Array | None:
            if part is None:
                return None
            return part[:, :, first:] if self.k_major else part[:, first:last]

        scales = None if self.scales is None else self.scales[:, index : index + 1]
        return Parts(self.format, (batch, rows, last - first), cut(self.hi), cut(self.lo), scales, self.k_major)


def split(stack: Array, form: Format, device: Device, k_major: bool) -> tuple[Parts, tuple[Guard, ...]]:
    """Split a stack of float32 matrices ``(batch, rows, k)`` with any strides.

    Parameters
    ----------
    stack
        On the device, which must be current. It is read in place where its rows or its k are contiguous.
    k_major
        Whether the parts' k must be contiguous; else the order of the stack is kept.

    Returns
    -------
    Parts, tuple of Guard
        The guards of each granule; those parts hold no numbers to compute with where one is raised. Reading them waits for
        the stream, if the format has guards.
    """
    import cupy

    placement = _placement(stack)
    if placement.contiguous is None:
        stack = cupy.ascontiguousarray(stack)
        placement = _placement(stack)
    batch, rows, k = stack.shape
    k_major = k_major or placement.contiguous == "k"
    ld = -(-(k if k_major else rows) // form.multiple) * form.multiple
    shape = (batch, rows if k_major else k, ld)
    parts = [cupy.empty(shape, form.dtype) for _ in range(form.parts)]
    count, pitch = granules(k), -(-rows // 4) * 4 + SCALES_PAST_END
    table = batch * count * pitch
    # flags, scales, and where rows are contiguous maxima and weights: all start from zero, in one go
    words = cupy.zeros(count + (1 if placement.contiguous == "k" else 3) * table, cupy.uint32)
    flags, scales = words[:count], words[count : count + table].view(cupy.float32).reshape(batch, count, pitch)
    for first in range(0, batch if rows and k else 0, MAX_GRID_Z):
        some = slice(first, first + MAX_GRID_Z)
        work = _Work(stack[some], form, placement, device, scales[some], pitch)
        hi, lo = parts[0][some].data.ptr, parts[-1][some].data.ptr
        if placement.contiguous == "k":
            work.by_rows(hi, lo, ld, flags.data.ptr)
        else:
            tables = [words[count + i * table + first * count * pitch :].data.ptr for i in (1, 2)]
            work.by_columns(tables, hi, lo, ld, flags.data.ptr, k_major)
    result = Parts(form, (batch, rows, k), parts[0], parts[1] if form.parts == 2 else None,
                   scales if form.scaled else None, k_major)  # fmt: skip
    return result, tuple(map(Guard, flags.tolist())) if form.guarded else (Guard(0),) * count


@dataclass(frozen=True)
class _Work:
    """The launches that split one stack."""

    stack: Array
    form: Format
    placement: Placement
    device: Device
    scales: Array
    pitch: int

    def by_rows(self, hi: int, lo: int, ld: int, flags: int) -> None:
        batch, rows, k = self.stack.shape
        warps = warps_of(k)
        kernel = self._kernel("split_rows", self.form, self.placement.aligned, warps)
        grid = -(-rows // (8 // warps)), granules(k), batch
        kernel.launch(grid, (), (*self._source(1), rows, k, hi, lo, ld, self.scales.data.ptr, self.pitch, flags))

    def by_columns(self, tables: list[int], hi: int, lo: int, ld: int, flags: int, k_major: bool) -> None:
        batch, rows, k = self.stack.shape
        aligned = self.placement.aligned
        grid = -(-rows // 128) * -(-k // 256), 1, batch
        if self.form.scaled:
            self._kernel("find_maxima", aligned).launch(grid, (), (*self._source(2), rows, k, tables[0], self.pitch))
        if k_major:
            kernel, grid = self._kernel("split_transposed", self.form), (-(-rows // 32) * -(-k // 64), 1, batch)
        else:
            kernel = self._kernel("split_columns", self.form, aligned)
        kernel.launch(
            grid, (), (*self._source(2), rows, k, *tables, hi, lo, ld, self.scales.data.ptr, self.pitch, flags)
        )

    def _source(self, axis: int) -> tuple[int, int, int]:
        """Address of the first element, bytes from one matrix to the next, and along the axis that is not contiguous."""
        return self.stack.data.ptr, self.stack.strides[0], self.stack.strides[axis]

    def _kernel(self, name: str, *parameters: Any) -> LoadedKernel:
        return loaded(Recipe(f"distmm_kernels.device_code.prepass:{name}", parameters), self.device)


def _placement(stack: Array) -> Placement:
    return place(stack.shape, stack.strides, stack.data.ptr, stack.itemsize)

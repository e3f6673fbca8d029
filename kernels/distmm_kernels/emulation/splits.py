"""float32 operands split into parts for tensor cores: the launches, and the memory layout of the parts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import GRANULE, Format, granules, warps_of
from distmm_kernels.emulation.launches import ALIGNMENT, Found, Plan
from distmm_kernels.emulation.sparsity import Counts, counts
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.bounded import MOST
from distmm_kernels.launch.driver import loaded
from distmm_kernels.layout.stack import VECTOR_BYTES, Array, Stack
from distmm_kernels.layout.vectors import in_vectors, row_pitch

PREPASS = "distmm_kernels.device_code.copies.prepass:"

# A tile may extend this many rows beyond the last one, and the kernel reads scales there: the most is 382, in a
# Hermitian product.
PAST_THE_ROWS = 384


class Piece(NamedTuple):
    """Granules of an operand, described for the Hopper kernel.

    Attributes
    ----------
    hi, lo
        ``(batch, rows, k)`` if ``k_major``, else ``(batch, k, rows)``.
    scales
        Address of the float32 scales of the rows, which are powers of two. `PAST_THE_ROWS` more words may be read. 0 if
        the format has no scales.
    scales_step
        Bytes from the scales of one matrix to those of the next; 0 if the format has no scales.
    """

    hi: Stack
    lo: Stack
    scales: int
    scales_step: int


class Layout(NamedTuple):
    """Memory layout of the parts of a stack ``(batch, rows, k)``: offsets in bytes from the start of their memory.

    If ``k_major``, each granule is a separate stack, with a leading dimension of `GRANULE` elements. With a leading
    dimension of k, the 128 rows that the TMA loads at once would be on too many pages of memory.
    """

    batch: int
    rows: int
    k: int
    k_major: bool
    lo: int
    scales: int
    maxima: int
    words: int
    table_pitch: int  # words
    granule_step: int  # elements
    ld: int  # elements, as the next one
    last_ld: int
    end: int

    @classmethod
    def of(cls, form: Format, batch: int, rows: int, k: int, k_major: bool) -> Layout:
        """Lay out the parts of a stack."""
        count, itemsize = max(granules(k), 1), form.dtype.itemsize
        if k_major:
            ld, last_ld = GRANULE, row_pitch(k - (count - 1) * GRANULE, itemsize)
            step = batch * rows * GRANULE
            elements = (count - 1) * step + batch * rows * last_ld
        else:
            ld = last_ld = row_pitch(rows, itemsize)
            elements, step = batch * k * ld, GRANULE * ld
        part = -(-elements * itemsize // ALIGNMENT) * ALIGNMENT
        pitch = rows + PAST_THE_ROWS + -rows % 4  # the kernel reads scales in pairs
        table = 4 * batch * count * pitch if form.scaled else 0
        maxima = 2 * part + table
        words = maxima + (0 if k_major else table)
        return cls(batch, rows, k, k_major, part, 2 * part, maxima, words, pitch, step, ld, last_ld, words + table)


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a stack of matrices ``(batch, rows, k)``, A or B transposed."""

    format: Format
    layout: Layout
    memory: Any

    @property
    def k_major(self) -> bool:
        """Whether the parts have k contiguous. Otherwise the rows are contiguous."""
        return self.layout.k_major

    def piece(self, index: int) -> Piece:
        """Return one granule."""
        at = self.layout
        length = min(GRANULE, at.k - index * GRANULE)
        ld = at.ld if index * GRANULE + length < at.k else at.last_ld
        lines, line = (at.rows, length) if at.k_major else (length, at.rows)
        # if rows are contiguous, a matrix has all of k, and the granule is a slice of it
        step = (at.rows if at.k_major else at.k) * ld
        return self._piece(index, at.batch, lines, line, ld, step, 4 * max(granules(at.k), 1) * at.table_pitch)

    def side_by_side(self, first: int, count: int) -> Piece:
        """Return ``count`` full granules of a single matrix as a stack, one matrix for each granule."""
        at = self.layout
        lines, line = (at.rows, GRANULE) if at.k_major else (GRANULE, at.rows)
        return self._piece(first, count, lines, line, at.ld, at.granule_step, 4 * at.table_pitch)

    def _piece(self, index: int, batch: int, lines: int, line: int, ld: int, step: int, scales_step: int) -> Piece:
        at, itemsize = self.layout, self.format.dtype.itemsize
        hi = self.memory.ptr + index * at.granule_step * itemsize
        lying = (batch, lines, line), (step * itemsize, ld * itemsize, itemsize), itemsize
        parts = Stack(hi, *lying), Stack(hi + at.lo, *lying)
        if not self.format.scaled:
            return Piece(*parts, 0, 0)
        return Piece(*parts, self.memory.ptr + at.scales + 4 * index * at.table_pitch, scales_step)

    @functools.cached_property
    def counts(self) -> tuple[Counts, ...]:
        """Counts of each granule of scaled parts. The device must be current, and have computed the parts."""
        import cupy

        at, count = self.layout, granules(self.layout.k)
        words = cupy.ndarray((at.batch, count, at.table_pitch), "uint32", self.memory + at.words)[..., : at.rows]
        return tuple(counts(words, tuple(min(GRANULE, at.k - i * GRANULE) for i in range(count))))


class Splitter:
    """Splits operands into one format on one device."""

    def __init__(self, form: Format, device: Device) -> None:
        self.form, self.device = form, device
        self._planned = functools.lru_cache(maxsize=MOST)(self._plan)

    def __call__(self, stack: Array) -> tuple[Parts, Found]:
        """Enqueue the kernels that split float32 matrices ``(batch, rows, k)`` or one matrix ``(rows, k)``.

        Strides are any. Matrices that no kernel reads as they are get a copy whose k is contiguous. The device must be
        current.
        """
        source = Stack.of(stack)
        plan = self._planned(source.at(source.address % VECTOR_BYTES))
        if plan is None:
            return self(in_vectors(stack, self.device))
        found = Found(granules(source.columns))
        memory = plan.enqueue(source.matrices, source.address, found.address)
        found.record()
        return Parts(self.form, plan.layout, memory), found

    def _plan(self, source: Stack) -> Plan | None:
        """Choose the kernels and the layout of the parts; None if the stack must be copied first.

        The address is only known modulo `VECTOR_BYTES`.
        """
        batch, rows, k = source.shape
        form, empty = self.form, 0 in source.shape
        k_major = empty or source.contiguous(-1)
        if not (k_major or (form.scaled and source.contiguous(-2))):
            return None
        at = Layout.of(form, batch, rows, k, k_major)
        numbers = (
            *(source.step, source.strides[1 if k_major else 2], rows, k),
            *(at.lo, at.scales, at.maxima, at.words, at.table_pitch, at.granule_step, at.ld, at.last_ld),
        )
        makers: dict[str, tuple[object, ...]] = {}
        if k_major:  # a block holds a row's granule in registers and reads memory once
            lines = at.table_pitch if form.scaled else rows
            grid, zeros = (-(-lines // (8 // warps_of(k))), granules(k)), 0
            makers["split_rows"] = form, source.aligned(-1), warps_of(k)
        else:  # rows stay contiguous: maxima first, then the split
            grid, zeros = (-(-rows // 128) * -(-k // 128), 1), at.end - at.scales
            makers["find_maxima"] = (source.aligned(-2),)
            makers["split_columns"] = form, source.aligned(-2)
        recipes = (Recipe(PREPASS + name, parameters) for name, parameters in makers.items() if not empty)
        launches = tuple((loaded(recipe, self.device), grid) for recipe in recipes)
        return Plan(at, launches, numbers, (at.scales, zeros))


splitter = functools.cache(Splitter)
"""splitter(form, device): a process has one of a format on a device."""

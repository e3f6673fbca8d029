"""Products on Hopper's tensor cores, operands loaded by the tensor memory accelerator: 8 bits, 16 bits, TF32.

The accelerator reads operands in place if rows or columns are contiguous and all of them begin at multiples of 16
bytes. Otherwise `prepare_a` and `prepare_b` copy them once. The kernel is in
`distmm_kernels.device_code.hopper.hopper_gemm`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from distmm_kernels.candidate import HOPPER, Candidate
from distmm_kernels.config import NARROW, Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import TF32
from distmm_kernels.emulation.splits import as_stack, splitter
from distmm_kernels.gemm.aligned import AlignedKernel
from distmm_kernels.gemm.guarded import WORKSPACE
from distmm_kernels.kernel import Array
from distmm_kernels.launch.hopper_launch import HopperGemm, hopper_gemm
from distmm_kernels.layout.stack import Stack, distinct
from distmm_kernels.layout.vectors import in_vectors, row_pitch
from distmm_kernels.tiles import hopper_tiles, slices
from distmm_kernels.tiles.hopper_tiles import ROWS, STRETCH, WIDEST_OF_TWO, HopperTile, best_columns

__all__ = ["HopperBf16Kernel", "HopperKernel", "HopperOperand", "HopperTf32Kernel"]

_ROUNDED = (np.dtype("float16"), np.dtype(ml_dtypes.bfloat16))  # types that the epilogue can round float32 sums to


@dataclass(frozen=True, eq=False)
class HopperOperand:
    """A prepared operand.

    Attributes
    ----------
    shape
        ``(*batch, m, k)`` or ``(*batch, k, n)``.
    array
        The same matrices, or their transposes, with contiguous rows; of those that a broadcast repeats, one.
    major
        The axis that is contiguous.
    stack
        Where the matrices lie, if there is one matrix only.
    """

    shape: tuple[int, ...]
    array: Array
    major: Any
    operand: hopper_tiles.OperandFormat
    stack: Stack | None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self.array.nbytes)


class HopperKernel(AlignedKernel):
    """float16 and bfloat16 accumulated in float32, int8 and uint8 in int32, bool in int64.

    Each `STRETCH` steps of k are summed by the tensor cores, which truncate, and added to C by float32 additions: of
    one slice after the other where that leaves multiprocessors without a tile (`distmm_kernels.tiles.slices`). Sums of
    integers are exact modulo 2^32. Tensor cores count the true terms of a bool product in int32, which no k exceeds.
    Counts of a chain of products are added in int64, since 2^32 must not look like zero; those of a part of C, of
    `WORKSPACE` bytes at most, are made at a time.
    """

    name = "hopper"
    takes_narrow = True
    granule = STRETCH  # sums of integers are exact, so these could be cut anywhere
    formats: ClassVar[dict[str, hopper_tiles.OperandFormat]] = {
        "float16": "float16",
        "bfloat16": "bfloat16",
        "int8": "int8",
        "uint8": "uint8",
        "bool": "uint8",  # whose bytes are 0 and 1
    }

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self.operand = self.formats[self.dtype.name]
        self._counts = self.dtype.kind == "b"
        self._gemms: dict[Any, HopperGemm] = {}

    def _format(self, block: Array, operand: str) -> HopperOperand:
        own, other = ("k", "m") if operand == "A" else ("n", "k")
        must_be = None if self.operand in ("float16", "bfloat16") else "k"
        shape, array = block.shape, self._converted(distinct(block))
        if must_be in (None, own) and Stack.of(array).loadable():
            return self._operand(shape, array, own)
        other_way = array.swapaxes(-1, -2)
        if must_be in (None, other) and Stack.of(other_way).loadable():
            return self._operand(shape, other_way, other)
        major = must_be or (other if Stack.of(other_way).contiguous(-1) else own)
        return self._operand(shape, in_vectors(array if major == own else other_way, self.device), major)

    def _converted(self, block: Array) -> Array:
        return block if block.dtype == self.dtype else block.astype(self.dtype)

    def _operand(self, shape: tuple[int, ...], array: Array, major: Any) -> HopperOperand:
        stack = Stack.for_tensor_map(array) if array.ndim == 2 else None
        return HopperOperand(shape, array, major, self.operand, stack)

    def _stores(self, dtype: np.dtype[Any]) -> bool:
        others = _ROUNDED if self.accumulator == np.float32 else (self.dtype,) if self._counts else ()
        return dtype == self.accumulator or dtype in others

    def _check(self, operand: Any, name: str) -> None:
        if not isinstance(operand, HopperOperand) or operand.operand != self.operand:
            kind = getattr(operand, "operand", type(operand).__name__)
            raise TypeError(
                f"{name} is {kind}, this kernel multiplies {self.operand}: prepare it with this kernel first"
            )

    def _accumulate(self, a: HopperOperand, b: HopperOperand, c: Array | None, d: Array) -> None:
        if self._counts:
            self._count(a, b, c, d)
        else:
            self._add(a, b, self._loadable(c), d)

    def _count(self, a: HopperOperand, b: HopperOperand, c: Array | None, d: Array) -> None:
        """Add counts to C, or say which of the sums are not zero, a part of C at a time."""
        *batch, m, n = d.shape
        rows = WORKSPACE // (12 * math.prod(batch) * row_pitch(n, 4))  # a count, and its sum with C
        rows = max(1, rows // ROWS * ROWS or rows)
        for first in range(0, m, rows):
            down = slice(first, min(m, first + rows))
            part = a.array[..., down, :]
            counts = self._rows((*batch, down.stop - first, n), np.dtype(np.int32))
            self._add(self._operand((*a.shape[:-2], *part.shape[-2:]), part, a.major), b, None, counts)
            to = d[..., down, :]
            if d.dtype == self.accumulator:
                self._module.add(counts, 0 if c is None else c[..., down, :], out=to)
            else:
                total = counts if c is None else counts + c[..., down, :]
                self._module.not_equal(total, 0, out=to)

    def _add(self, a: HopperOperand, b: HopperOperand, c: Array | None, d: Array) -> None:
        if a.stack is not None and b.stack is not None:
            self._multiply(a, b, a.stack, b.stack, c, d)
            return
        batch = d.shape[:-2]
        arrays = [np.broadcast_to(x.array, (*batch, *x.array.shape[-2:])) for x in (a, b)]
        for index in np.ndindex(batch[:-1]):
            stacks = [Stack.for_tensor_map(array[index]) for array in arrays]
            self._multiply(a, b, stacks[0], stacks[1], None if c is None else c[index], d[index])

    def _multiply(
        self, a: HopperOperand, b: HopperOperand, a_stack: Stack, b_stack: Stack, c: Array | None, d: Array
    ) -> None:
        to, k, majors = Stack.for_tensor_map(d), a.shape[-1], (a.major, b.major)
        deep = k > STRETCH and self.accumulator == np.float32
        if k > STRETCH and not self._counts:
            sizes = to.rows, to.columns, slices.count(k), to.matrices, 1
            together = slices.at_once(*sizes, self.device.multiprocessors, WIDEST_OF_TWO if deep else 256)
            if together > 1:
                self._in_slices(k, together, majors, (a_stack, b_stack), c, d)
                return
        added = None if c is None else Stack.for_tensor_map(c)
        self._gemm(majors, to, d.dtype, deep, False, c is not None)((a_stack,), (b_stack,), added, to)

    def _gemm(
        self, majors: tuple[Any, Any], to: Stack, dtype: np.dtype[Any], promotes: bool, sliced: bool, adds: bool
    ) -> HopperGemm:
        key = majors, to.shape, dtype, promotes, sliced, adds
        gemm = self._gemms.get(key)
        if gemm is None:
            widest = WIDEST_OF_TWO if promotes else 256
            columns = best_columns(to.rows, to.columns, to.matrices, 1, self.device.multiprocessors, widest)
            output: Any = dtype.name
            tile = HopperTile(self.operand, output, columns, *majors, 1, promotes, sliced, adds)
            gemm = self._gemms[key] = hopper_gemm(tile, self.device)
        return gemm

    def _in_slices(
        self, k: int, together: int, majors: tuple[Any, Any], stacks: tuple[Stack, Stack], c: Array | None, d: Array
    ) -> None:
        """Multiply slices of k at the same time, ``together`` of them in each run, and add their sums in order."""
        last = slices.count(k)
        total = d if d.dtype == self.accumulator or together == last else self._rows(d.shape, self.accumulator)
        for first, after in slices.runs(last, together):
            left, right = (
                stack.part(-1 if major == "k" else -2, first * STRETCH, min(after * STRETCH, k))
                for stack, major in zip(stacks, majors, strict=True)
            )
            sums = self._rows((*d.shape[:-2], after - first, *d.shape[-2:]), self.accumulator)
            to = Stack.for_tensor_map(sums.reshape(-1, *sums.shape[-2:]))
            self._gemm(majors, to, self.accumulator, False, True, False)((left,), (right,), None, to)
            self._add_slices(sums, c, d if after == last else total)
            c = total


class HopperTf32Kernel(HopperKernel):
    """float32 operands, which the load rounds to nearest to 11 significant bits (TF32)."""

    name = "hopper_tf32"
    formats: ClassVar[dict[str, hopper_tiles.OperandFormat]] = {"float32": "tfloat32"}

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self._split = splitter(TF32, device)

    def _format(self, block: Array, operand: str) -> HopperOperand:
        # rows of A, columns of B
        own = distinct(block)
        rows = self._converted(own if operand == "A" else own.swapaxes(-1, -2))
        if Stack.of(rows).loadable():
            return self._operand(block.shape, rows, "k")
        parts, _ = self._split(as_stack(rows))
        return self._operand(block.shape, parts.rounded(rows.shape), "k")


class HopperBf16Kernel(HopperKernel):
    """float32 operands rounded to bfloat16."""

    name = "hopper_bf16"
    formats: ClassVar[dict[str, hopper_tiles.OperandFormat]] = {"float32": "bfloat16"}

    def _converted(self, block: Array) -> Array:
        return block.astype(self.dtype, copy=False).astype(ml_dtypes.bfloat16)


_ON_HOPPER = partial(
    Candidate, tile=(128, 128), capabilities=HOPPER, unit="tensor", sizes_below=hopper_tiles.COORDINATES
)
TABLE = (
    _ON_HOPPER(
        HopperBf16Kernel,
        "operands rounded to bfloat16, on tensor cores",
        frozenset({"float32"}),
        "medium",
        prepared=0.5,
        workspace=slices.WORKSPACE,
    ),
    _ON_HOPPER(
        HopperTf32Kernel,
        "operands rounded to TF32, on tensor cores",
        frozenset({"float32"}),
        "high",
        prepared=1.0,
        workspace=slices.WORKSPACE,
    ),
    _ON_HOPPER(
        HopperKernel,
        "tensor cores fed by the tensor memory accelerator",
        frozenset(dtype.name for dtype in NARROW),
        "highest",
        workspace=WORKSPACE,  # counts of bools
    ),
)

"""Products on Hopper's tensor cores, operands loaded by the tensor memory accelerator: 8 bits, 16 bits, TF32.

The accelerator (TMA) reads operands in place if rows or columns are contiguous and all of them begin at multiples of 16
bytes. Otherwise `prepare_a` and `prepare_b` copy them once. The kernel is in
`distmm_kernels.device_code.hopper.hopper_gemm`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import ml_dtypes
import numpy as np

from distmm_kernels.candidate import HOPPER, Candidate
from distmm_kernels.config import FLOAT8, NARROW, Problem
from distmm_kernels.device import Device
from distmm_kernels.gemm.aligned import AlignedKernel
from distmm_kernels.gemm.guarded import WORKSPACE
from distmm_kernels.gemm.operands import Operand, joined
from distmm_kernels.kernel import Array, Enqueue, product_shape
from distmm_kernels.last_step import Last
from distmm_kernels.launch.bounded import MOST
from distmm_kernels.launch.hopper_launch import NO_FINISH, NO_SCALES, Finish, HopperGemm, HopperGemms
from distmm_kernels.layout.stack import VECTOR_BYTES, Stack, address, distinct
from distmm_kernels.layout.vectors import in_vectors, row_pitch
from distmm_kernels.tiles import hopper_tiles, slices
from distmm_kernels.tiles.hopper_tiles import ROWS, STRETCH

Stacks: TypeAlias = tuple[tuple[Stack, ...], tuple[Stack, ...]]  # of A and of B: one each, or those of all panels

# by the accumulator's kind, the other types that the epilogue can store: floats are rounded, integers keep low bits
_STORED = {"f": (np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)), "i": (np.dtype("int8"), np.dtype("uint8"))}


class HopperKernel(AlignedKernel):
    """float16 and bfloat16 accumulated in float32, int8 and uint8 in int32, bool in int64.

    Tensor cores sum `STRETCH` steps of k at a time, and truncate. Each of these sums is added to C by a float32
    addition. If C has too few tiles for all multiprocessors, several slices of k are multiplied at the same time, and
    their sums are added afterwards (`distmm_kernels.tiles.slices`). Integer sums are exact modulo 2^32.

    For a bool product, tensor cores count the true terms in int32, which holds any k. A single product stores whether
    the count is positive. A chain of products adds counts in int64, since a count of 2^32 must not look like zero. The
    counts are computed for a part of C at a time, with `WORKSPACE` bytes at most.
    """

    name = "hopper"
    takes_narrow = True
    granule = STRETCH  # for floats; sums of integers are exact, so cuts anywhere are allowed
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
        self._float8 = self.dtype in FLOAT8
        self.reads = tuple(self.formats) if self._float8 else (self.operand,)  # both 8-bit floats
        self._counts = self.dtype.kind == "b"
        self._gemms = HopperGemms(device)

    def _format(self, block: Array, operand: str) -> Operand:
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

    def _operand(self, shape: tuple[int, ...], array: Array, major: Any) -> Operand:
        return Operand(shape=shape, format=self.operand, made=(array,), major=major)

    def _stores(self, dtype: np.dtype[Any]) -> bool:
        return dtype == self.accumulator or dtype in ((self.dtype,) if self._counts else _STORED[self.accumulator.kind])

    def joined(self, operands: Sequence[tuple[Operand, Operand]]) -> list[tuple[Any, Any]]:
        """Join consecutive panels of the same k; the last one may have a smaller k. Panels in slices stay apart."""
        return joined(operands, lambda a, b: self._slices_at_once((a.shape[-2], b.shape[-1]), a.shape[-1]) > 1)

    def _accumulate(self, a: Operand, b: Operand, c: Array | None, d: Array) -> None:
        if self._counts and (c is not None or d.dtype == self.accumulator):
            self._count(a, b, c, d)
        else:
            self._add(a, b, self._loadable(c), d)

    def _triangle(self, a: Operand, b: Operand, c: Array | None, d: Array) -> bool:
        if d.itemsize == 1 or self._counts:  # sums of integers, which are symmetric in the full product
            return super()._triangle(a, b, c, d)
        self._add(a, b, self._loadable(c), d, symmetric=True)
        return True

    def _finished(
        self, a: Operand, b: Operand, c: Array | None, last: Last, symmetric: bool, out: Array | None = None
    ) -> Array | None:
        types = (self.accumulator, *_STORED["f"])
        if self.accumulator != np.float32 or last.dtype not in types:
            return None
        if last.c0 is not None and last.c0.dtype not in types:
            return None
        d = out if out is not None and self._writes(out) else self._empty(product_shape(a.shape, b.shape), last.dtype)
        if len(a.made) == 1 and self._slices_at_once(d.shape, a.shape[-1], symmetric) > 1:
            return None
        self._add(a, b, self._loadable(c), d, last._replace(c0=self._loadable(last.c0)), symmetric)
        if symmetric and last.c0 is not None:
            self._mirror(d, "symmetric")  # where the diagonal crosses a box, the launch has added both halves of C0
        return d

    def direct(self, a: Array, b: Array, d: Array, symmetric: bool = False) -> Enqueue | None:
        """Return the launch for one matrix, or for one axis of matrices, that the TMA reads in place."""
        left, right, k = self._format(a, "A"), self._format(b, "B"), a.shape[-1]
        in_place = all(address(x.made[0]) == address(y) for x, y in ((left, a), (right, b)))
        if not in_place or d.ndim > 3 or not self._stores(d.dtype) or not self._writes(d):
            return None
        if self._counts and d.dtype == self.accumulator:
            return None
        symmetric = symmetric and d.itemsize > 1  # the full product is symmetric, and faster than a conversion to bytes
        if self._slices_at_once(d.shape, k, symmetric) > 1:
            return None
        whole = (np.broadcast_to(x, (*d.shape[:-2], *x.shape[-2:])) for x in (*left.made, *right.made))
        first, second, to = (Stack.for_tensor_map(x) for x in (*whole, d))
        promotes = (k > STRETCH or self._float8) and self.accumulator == np.float32
        gemm = self._gemm(left, right, to, d.dtype, promotes=promotes, symmetric=symmetric)

        @functools.lru_cache(maxsize=MOST)  # allocators soon return the same addresses again
        def bound(of_a: int, of_b: int, of_d: int, stream: int) -> Callable[[], None]:
            return gemm.bound((first.at(of_a),), (second.at(of_b),), to.at(of_d), stream)

        return lambda *places: bound(*places)()

    def _count(self, a: Operand, b: Operand, c: Array | None, d: Array) -> None:
        """Add counts to C, if there is one, for a part of C at a time. A D of bool says which sums are not zero."""
        *batch, m, n = d.shape
        rows = WORKSPACE // (12 * math.prod(batch) * row_pitch(n, 4))  # a count, and its sum with C
        rows = max(1, rows // ROWS * ROWS or rows)
        for first in range(0, m, rows):
            down = slice(first, min(m, first + rows))
            counts = self._empty((*batch, down.stop - first, n), np.dtype(np.int32))
            self._add(a.rows(down), b, None, counts)
            to, added = d[..., down, :], 0 if c is None else c[..., down, :]
            if d.dtype == self.accumulator:
                self._module.add(counts, added, out=to)
            else:
                self._module.not_equal(counts + added, 0, out=to)

    def _add(
        self, a: Operand, b: Operand, c: Array | None, d: Array, last: Last | None = None, symmetric: bool = False
    ) -> None:
        if a.stacks and b.stacks:
            self._multiply(a, b, (a.stacks, b.stacks), c, d, last, symmetric)
            return
        batch = d.shape[:-2]
        arrays = [np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (*a.made, *b.made)]
        for index in np.ndindex(batch[:-1]):
            of_a, of_b = (Stack.for_tensor_map(array[index]) for array in arrays)
            added = None if c is None else c[index]
            here = last if last is None or last.c0 is None else last._replace(c0=last.c0[index])
            self._multiply(a, b, ((of_a,), (of_b,)), added, d[index], here, symmetric)

    def _multiply(
        self, a: Operand, b: Operand, stacks: Stacks, c: Array | None, d: Array, last: Last | None, symmetric: bool
    ) -> None:
        to, k, panels = Stack.for_tensor_map(d), a.shape[-1], len(stacks[0]) > 1
        together = 1 if panels or last is not None else self._slices_at_once(to.shape, k, symmetric)
        if together > 1:
            self._in_slices(a, b, stacks, together, c, d, symmetric)
            return
        promotes = (panels or k > STRETCH or self._float8) and self.accumulator == np.float32
        added = None if c is None else Stack.for_tensor_map(c)
        c0 = None if last is None else last.c0
        gemm = self._gemm(
            a, b, to, d.dtype, promotes=promotes, adds=c is not None, panels=panels, finishes=last is not None,
            c0=None if c0 is None else c0.dtype.name, symmetric=symmetric,
        )  # fmt: skip
        finish = NO_FINISH if last is None else Finish.of(last.alpha, last.beta, c0)
        gemm(*stacks, added, to, NO_SCALES, finish)

    def _slices_at_once(self, shape: tuple[int, ...], k: int, symmetric: bool = False) -> int:
        """Return how many slices of k to multiply at the same time for a result of this shape."""
        if k <= STRETCH or self._counts or self._float8:
            return 1
        *batch, m, n = shape
        sizes = m, n, slices.count(k), (batch or [1])[-1], 1, self.device.multiprocessors
        return slices.at_once(*sizes, hopper_tiles.widest(self.accumulator == np.float32), symmetric)

    def _gemm(self, a: Operand, b: Operand, to: Stack, dtype: np.dtype[Any], **variant: Any) -> HopperGemm:
        """Return the GEMM for operands like these and a result of this layout; see `HopperTile` for its variants."""
        output = {"b": "bool", "i": "uint8", "u": "uint8"}[dtype.kind] if dtype.itemsize == 1 else dtype.name
        other = None if a.format == b.format else b.format
        return self._gemms(to, output, operand=a.format, a_major=a.major, b_major=b.major, b_operand=other, **variant)

    def _in_slices(
        self, a: Operand, b: Operand, stacks: Stacks, together: int, c: Array | None, d: Array, symmetric: bool
    ) -> None:
        """Multiply ``together`` slices of k at the same time, and add their sums in ascending k."""
        if d.itemsize == 1:  # C is small
            total = self._empty(d.shape, self.accumulator)
            self._in_slices(a, b, stacks, together, c, total, symmetric)
            d[...] = total
            return
        k = a.shape[-1]
        last = slices.count(k)
        total = d if d.dtype == self.accumulator or together == last else self._empty(d.shape, self.accumulator)
        for first, after in slices.runs(last, together):
            left, right = (
                stack.part(-1 if x.major == "k" else -2, first * STRETCH, min(after * STRETCH, k))
                for (stack,), x in zip(stacks, (a, b), strict=True)
            )
            sums = self._empty((*d.shape[:-2], after - first, *d.shape[-2:]), self.accumulator)
            to = Stack.for_tensor_map(sums.reshape(-1, *sums.shape[-2:]))
            gemm = self._gemm(a, b, to, self.accumulator, sliced=True, symmetric=symmetric)
            gemm((left,), (right,), None, to)
            self._add_slices(sums, c, d if after == last else total)
            c = total


def _in_place(problem: Problem, by_columns: bool, *_: Any) -> bool:
    """Whether the TMA reads both operands in place. Those of 8 bits must be contiguous along k."""
    lines = (problem.k, problem.k) if by_columns else (problem.k, problem.n)
    wide = problem.dtype.itemsize == 2
    return (wide or by_columns) and not any(size * problem.dtype.itemsize % VECTOR_BYTES for size in lines)


ON_HOPPER = partial(
    Candidate, tile=(128, 128), capabilities=HOPPER, unit="tensor", sizes_below=hopper_tiles.COORDINATES
)
TABLE = (
    ON_HOPPER(
        HopperKernel,
        "tensor cores fed by the tensor memory accelerator",
        frozenset(dtype.name for dtype in NARROW),
        "highest",
        # counts of bools; of other types the sums of slices
        workspace={dtype.name: WORKSPACE if dtype.kind == "b" else slices.WORKSPACE for dtype in NARROW},
        direct=_in_place,
        in_place={"float16": "AB", "bfloat16": "AB", "int8": "A", "uint8": "A", "bool": "A"},
        slice=STRETCH,
        one_launch=frozenset({"float16", "bfloat16"}),
        triangles=frozenset(dtype.name for dtype in NARROW if dtype.kind != "b"),
    ),
)

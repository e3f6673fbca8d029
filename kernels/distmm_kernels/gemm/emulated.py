"""float32 products on tensor cores that multiply 11 bits: three products of halves, granule by granule of k.

``A B = A_low B_high + A_high B_low + A_high B_high``, with the halves of `distmm_kernels.emulation.formats`. The Hopper
kernel adds the three products. It adds their sum to a float32 total after every stage, since tensor cores truncate.
float16 halves are twice as fast as TF32 halves, and accurate for numbers of similar size. Each granule uses the first
of these algorithms that its guards allow:

1. float16 halves with scales;
2. TF32 halves, for any range of exponents within which products and their sums neither overflow nor underflow;
3. float32 multiply-adds, for infinities and subnormals, and for short granules, where they round less often.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from distmm_kernels.candidate import AMPERE, FAST_TENSOR_CORES, Candidate
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import FP16_PAIR, GRANULE, TF32_PAIR, Format
from distmm_kernels.emulation.launches import Found, as_stack
from distmm_kernels.emulation.splits import Parts, Piece, splitter
from distmm_kernels.gemm.guarded import WORKSPACE, GuardedKernel, GuardedOperand, Way, by_parts
from distmm_kernels.gemm.hopper import ON_HOPPER
from distmm_kernels.kernel import Array, product_shape
from distmm_kernels.last_step import Last
from distmm_kernels.launch.fragment_launch import FragmentGemm, fragment_gemm
from distmm_kernels.launch.hopper_launch import Finish, HopperGemms, Scales
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles import slices
from distmm_kernels.tiles.hopper_tiles import WIDEST_OF_TWO

# For a shorter k, a chain of multiply-adds has a smaller error than the split (by twins.py of the tests, N(0, 1) and
# U(0, 1)).
SHORTEST = 256

TF32_BYTES = 12  # of an element: two TF32 halves, and a copy if k is not contiguous

ADDENDS = None, "float32", "float16", "bfloat16"  # types of C0 that the kernel adds


class Side(NamedTuple):
    """Granules of an operand that are multiplied, and the batch of its matrices."""

    parts: Parts
    piece: Piece
    batch: tuple[int, ...]

    def at(self, batch: tuple[int, ...], index: tuple[int, ...]) -> Piece:
        """Return the matrices at ``index`` of the leading axes of the result's batch: one if it is broadcast."""
        piece, own = self.piece, (1,) * (len(batch) - len(self.batch)) + self.batch
        if not batch:
            return piece._replace(scales_step=0)
        first = 0
        for size, place in zip(own, (*index, 0), strict=True):
            first = first * size + (place if size > 1 else 0)
        number = own[-1]
        hi, lo = (part.part(-3, first, first + number) for part in (piece.hi, piece.lo))
        return Piece(hi, lo, piece.scales + first * piece.scales_step, piece.scales_step if number > 1 else 0)


class Fp16x3Kernel(GuardedKernel):
    """Halves in float16, if the operands allow them."""

    name = "fp16x3"
    shortest = SHORTEST
    form: ClassVar[Format] = FP16_PAIR
    first: ClassVar[Way] = Way.FP16X3
    finishes: ClassVar[bool] = True  # whether its launches multiply by alpha and add beta C0
    mirrors = True
    # TF32 halves of a larger product are faster than the library, their splits and guards included
    library_below: float = 2**34

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self.reads = (self.form.name,)
        self._split = splitter(self.form, device)
        self._gemms = HopperGemms(device)
        self._unread: list[Found] = []  # guards of TF32 halves, to whose memory the device may still write

    def _way(self, a: GuardedOperand, b: GuardedOperand, index: int) -> Way:
        way = super()._way(a, b, index)
        tf32 = way is Way.IEEE and self.first is Way.FP16X3 and all(self._fits_tf32(x, index) for x in (a, b))
        return Way.TF32X3 if tf32 else way

    def _fits_tf32(self, operand: GuardedOperand, index: int) -> bool:
        """Whether TF32 halves hold a granule.

        This splits the granule and reads the guards. The halves are not kept, so the product splits it again.
        """
        if index not in operand.by_tf32:
            granule, split = operand.granule(index), splitter(TF32_PAIR, self.device)
            some = by_parts(granule, granule[..., :1, :], None, granule[..., :1], TF32_BYTES)  # with one column of D
            operand.by_tf32[index] = not any(split(as_stack(rows))[1].raised for rows, *_ in some)
        return operand.by_tf32[index]

    def _chain(self, ways: tuple[Way, ...], a: Any, b: Any, c: Array | None, d: Array, symmetric: bool = False) -> None:
        # a Hermitian D is given as real numbers: it has twice as many columns as rows
        index, triangle = 0, d.shape[-1] // d.shape[-2] if symmetric and self.mirrors else 0
        while index < len(ways):
            count, way = self._at_once(ways[index:], a.shape[-1] - index * GRANULE, d, triangle), ways[index]
            if count > 1:
                products = self._empty((count, *d.shape), self.accumulator)
                left, right = (Side(x.made, x.made.side_by_side(index, count), (count,)) for x in (a, b))
                self._tensor_cores(left, right, None, products, triangle)
                self._add_slices(products, self._loadable(c), d)
            elif way is Way.IEEE:
                self._by_multiply_adds(index, a, b, c, d)
            elif way is self.first:
                left, right = (Side(x.made, x.made.piece(index), x.batch) for x in (a, b))
                self._tensor_cores(left, right, c, d, triangle)
            else:
                self._by_tf32_halves(index, a, b, c, d)
            index += count
            c = d

    def _finished(
        self, a: Any, b: Any, c: Array | None, last: Last, symmetric: bool, out: Array | None = None
    ) -> Array | None:
        """Multiply one granule of one matrix in one launch, before its guards arrive (see `_accumulate`).

        The result is new: ``out`` may be C0, which is read again if a guard is raised.
        """
        shape, c0 = product_shape(a.shape, b.shape), last.c0
        kind, known = None if c0 is None else c0.dtype.name, self._waits(a, b)
        if not self.finishes or len(shape) > 2 or last.dtype != self.accumulator or kind not in ADDENDS:
            return None
        if self._expected(a.shape[-1]) != (self.first,) or (known and not self._allowed(a, b)):
            return None
        d, c, c0 = self._empty(shape, last.dtype), self._loadable(c), self._loadable(c0)
        finish = Finish.of(last.alpha, last.beta, c0)
        left, right, to = a.made.piece(0), b.made.piece(0), Stack.for_tensor_map(d)
        gemm = self._gemm(a.made, b.made, to, adds=c is not None, symmetric=symmetric, finishes=True, c0=kind)
        added = None if c is None else Stack.for_tensor_map(c)
        gemm((left.hi, left.lo), (right.hi, right.lo), added, to, Scales(left.scales, 0, right.scales, 0), finish)
        return d if known or self._allowed(a, b) else None

    def _allowed(self, a: GuardedOperand, b: GuardedOperand) -> bool:
        """Whether the guards of the first granule allow this kernel's halves."""
        return self._ways(a, b)[0] is self.first

    def _by_tf32_halves(self, index: int, a: GuardedOperand, b: GuardedOperand, c: Array | None, d: Array) -> None:
        """Add the product of one granule that float16 halves do not hold."""
        unread: list[Found] = []
        for left, right, added, to in by_parts(a.granule(index), b.granule(index), c, d, TF32_BYTES):
            unread += self._tf32_product(left, right, added, to)  # frees its halves before the next ones are made
        self._unread = unread  # to drop guards waits for the device: those of the granule before are dropped here

    def _tf32_product(self, left: Array, right: Array, c: Array | None, d: Array) -> list[Found]:
        halves = [splitter(TF32_PAIR, self.device)(as_stack(x)) for x in (left, right)]
        a, b = (Side(y, y.piece(0), x.shape[:-2]) for x, (y, _) in zip((left, right), halves, strict=True))
        self._tensor_cores(a, b, c, d)
        return [found for _, found in halves]

    def _at_once(self, ways: tuple[Way, ...], k: int, d: Array, symmetric: int = 0) -> int:
        """Return how many granules to multiply at once: more than one if one leaves multiprocessors idle.

        Only whole granules of this kernel's halves count, since their parts are a constant number of bytes apart.
        """
        if k < 2 * GRANULE or d.ndim > 2 or ways[0] is not self.first:
            return 1
        alike = next((i for i, way in enumerate(ways) if way is not self.first), len(ways))
        sizes = *d.shape, min(alike, k // GRANULE)
        return slices.at_once(*sizes, 1, 3, self.device.multiprocessors, WIDEST_OF_TWO, symmetric)

    def _tensor_cores(self, a: Side, b: Side, c: Array | None, d: Array, symmetric: int = 0) -> None:
        c, batch = self._loadable(c), d.shape[:-2]
        for index in np.ndindex(batch[:-1]):
            left, right = a.at(batch, index), b.at(batch, index)
            to = Stack.for_tensor_map(d[index] if index else d)
            added = None if c is None else Stack.for_tensor_map(c[index] if index else c)
            scales = Scales(left.scales, left.scales_step, right.scales, right.scales_step)
            gemm = self._gemm(a.parts, b.parts, to, adds=c is not None, symmetric=symmetric)
            gemm((left.hi, left.lo), (right.hi, right.lo), added, to, scales)

    def _gemm(self, a: Parts, b: Parts, to: Stack, **variant: Any) -> Any:
        """Return the GEMM for parts and results with these layouts; see `HopperTile` for its variants."""
        half, majors = a.format.scaled, {"a_major": "k" if a.k_major else "m", "b_major": "k" if b.k_major else "n"}
        kind = "float16" if half else "tfloat32"
        return self._gemms(to, "float32", operand=kind, **majors, products=3, scaled=half, **variant)


class Tf32x3Kernel(Fp16x3Kernel):
    """Halves in TF32: half as fast, and accurate for nearly any numbers."""

    name = "tf32x3"
    form = TF32_PAIR
    first = Way.TF32X3


class MmaSyncFp16x3Kernel(Fp16x3Kernel):
    """Halves in float16, by the `mma.sync` kernel: on tensor cores of any GPU since Ampere."""

    name = "mma_sync_fp16x3"
    finishes = mirrors = False

    def _gemm(self, a: Parts, b: Parts, to: Stack, **variant: Any) -> FragmentGemm:
        return fragment_gemm("float16" if a.format.scaled else "tfloat32", (a.k_major, b.k_major), self.device)


# float16 halves take as much memory as the block, TF32 halves twice as much. The scales of float16 halves took 5 MB of
# 40 GB. The workspace holds the TF32 halves or copies of parts of A and B, which a raised guard demands.
FLOAT16_HALVES, TF32_HALVES = 1.001, 2.0
_Halves = partial(Candidate, dtypes=frozenset({"float32"}), precision="highest", workspace=WORKSPACE, slice=GRANULE)
_ON_HOPPER = partial(ON_HOPPER, **_Halves.keywords, triangles=frozenset({"float32"}))

TABLE = (
    _ON_HOPPER(Fp16x3Kernel, "three products of scaled float16 halves, on tensor cores", prepared=FLOAT16_HALVES),
    _ON_HOPPER(Tf32x3Kernel, "three products of TF32 halves, on tensor cores", prepared=TF32_HALVES, copied=1.0),
    _Halves(
        MmaSyncFp16x3Kernel,
        "three products of scaled float16 halves, on tensor cores fed by ldmatrix",
        tile=(64, 64),
        capabilities=AMPERE,
        worth_it=FAST_TENSOR_CORES,
        unit="mma_sync",
        prepared=FLOAT16_HALVES,
    ),
)

"""float32 products on tensor cores that multiply 11 bits: three products of halves, each granule of k by what suits it.

``A B = A_low B_high + A_high B_low + A_high B_high``: the halves are those of `distmm_kernels.formats`. The Hopper
kernel adds the products, and takes the sum out of the tensor cores every stage, since those truncate. float16 halves
are twice as fast as TF32 ones, and right for numbers of like size; where a guard says otherwise, the granule takes
another way:

1. float16 halves with scales;
2. TF32 halves: any range of exponents that float32 sums hold, but not where few numbers make each sum;
3. float32 multiply-adds: infinities, subnormals, and short granules, where a chain has fewer roundings than a split.

A granule's way depends on its own numbers only, so that cuts of k at granules leave the bits of the result as they are.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.formats import FP16_PAIR, GRANULE, TF32_PAIR, Format, Guard
from distmm_kernels.gemm.aligned import AlignedKernel, addable
from distmm_kernels.gemm.register_tiled import RegisterTiledKernel
from distmm_kernels.hopper_launch import NO_SCALES, HopperGemm, Scales
from distmm_kernels.hopper_tiles import ROWS, HopperTile
from distmm_kernels.kernel import Array
from distmm_kernels.splits import Found, Parts, as_stack, splitter
from distmm_kernels.tensor_map import MatrixStack

__all__ = ["Fp16x3Kernel", "SplitOperand", "Tf32x3Kernel", "Way"]

# A chain of fewer multiply-adds has a smaller error than the split: twins.py, N(0, 1) and U(0, 1)
SHORTEST = 256


class Way(enum.Enum):
    """How a granule is multiplied."""

    FP16X3 = enum.auto()
    TF32X3 = enum.auto()
    IEEE = enum.auto()


@dataclass(frozen=True, eq=False)
class SplitOperand:
    """A prepared operand.

    Attributes
    ----------
    shape
        ``(*batch, m, k)`` or ``(*batch, k, n)``.
    matrices
        The operand itself, ``(*batch, rows, k)``: A, or B transposed. Kept for granules that take another way.
    parts, found
        Its halves, and what their guards found.
    """

    shape: tuple[int, ...]
    matrices: Array
    parts: Parts
    found: Found
    others: dict[int, tuple[Parts, Found]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, those of the operand itself included."""
        return int(self.matrices.nbytes) + self.parts.nbytes

    def granule(self, index: int) -> Array:
        """Return one granule of the operand itself."""
        return self.matrices[..., index * GRANULE : (index + 1) * GRANULE]

    def by_tf32(self, index: int, device: Device) -> tuple[Parts, Found]:
        """Return one granule in TF32 halves; split at the first call."""
        if self.parts.format is TF32_PAIR:
            return self.parts.granule(index), self.found
        if index not in self.others:
            self.others[index] = splitter(TF32_PAIR, device)(as_stack(self.granule(index)))
        return self.others[index]


class Fp16x3Kernel(AlignedKernel):
    """Halves in float16, where the operands allow it."""

    name = "fp16x3"
    granule = GRANULE
    form: ClassVar[Format] = FP16_PAIR
    first: ClassVar[Way] = Way.FP16X3

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self._ieee = RegisterTiledKernel(problem, device)
        self._gemms: dict[tuple[Any, ...], HopperGemm] = {}

    def _format(self, block: Array, operand: str) -> SplitOperand:
        block = block.astype(self.dtype, copy=False)
        matrices = block if operand == "A" else block.swapaxes(-1, -2)
        return SplitOperand(block.shape, matrices, *splitter(self.form, self.device)(as_stack(matrices)))

    def _check(self, operand: Any, name: str) -> None:
        if not isinstance(operand, SplitOperand) or operand.parts.format is not self.form:
            raise TypeError(f"{name} is no operand that {self.name} has prepared: prepare it with this kernel first")

    def _accumulate(self, a: SplitOperand, b: SplitOperand, c: Array | None, d: Array) -> None:
        lengths = [min(GRANULE, a.shape[-1] - first) for first in range(0, a.shape[-1], GRANULE)]
        expected = [self.first if length >= SHORTEST else Way.IEEE for length in lengths]
        # While the guards are on their way, the product that they nearly always allow is begun: nobody waits. If one
        # is raised after all, D is computed again; C is still there.
        begun = not (a.found.here and b.found.here)
        if begun:
            self._chain(expected, a, b, c, d)
        ways = [way if way is Way.IEEE else self._way(a, b, i) for i, way in enumerate(expected)]
        if not begun or ways != expected:
            self._chain(ways, a, b, c, d)

    def _way(self, a: SplitOperand, b: SplitOperand, index: int) -> Way:
        """Choose for one granule, from its guards."""
        raised = a.found.guards[index] | b.found.guards[index]
        if not raised:
            return self.first
        if self.first is Way.TF32X3 or Guard.FEW in raised:
            return Way.IEEE
        found = [operand.by_tf32(index, self.device)[1] for operand in (a, b)]
        return Way.IEEE if any(guards.guards[0] for guards in found) else Way.TF32X3

    def _chain(self, ways: list[Way], a: SplitOperand, b: SplitOperand, c: Array | None, d: Array) -> None:
        """Add granule after granule; all but the first to what is in D already, element by element."""
        for index, way in enumerate(ways):
            if way is Way.IEEE:
                self._ieee._accumulate(a.granule(index), b.granule(index).swapaxes(-1, -2), c, d)
            elif way is Way.TF32X3:
                parts = [operand.by_tf32(index, self.device)[0] for operand in (a, b)]
                self._tensor_cores(parts[0], parts[1], a, b, c, d)
            else:
                self._tensor_cores(a.parts.granule(index), b.parts.granule(index), a, b, c, d)
            c = d

    def _tensor_cores(
        self, a: Parts, b: Parts, a_of: SplitOperand, b_of: SplitOperand, c: Array | None, d: Array
    ) -> None:
        if c is not None and not addable(c):
            c = self._padded(c)
        batch = d.shape[:-2]
        for index in np.ndindex(batch[:-1]):
            to, added = MatrixStack.of(d[index]), None if c is None else MatrixStack.of(c[index])
            a_first, a_number = _matrices(a_of.shape[:-2], batch, index)
            b_first, b_number = _matrices(b_of.shape[:-2], batch, index)
            scales = NO_SCALES
            if a.scales:
                scales = Scales(
                    a.scales + a_first * a.scales_step,
                    a.scales_step if a_number > 1 else 0,
                    b.scales + b_first * b.scales_step,
                    b.scales_step if b_number > 1 else 0,
                )
            self._gemm(a, b, to, added is not None)(
                tuple(_some(part, a_first, a_number) for part in (a.hi, a.lo)),
                tuple(_some(part, b_first, b_number) for part in (b.hi, b.lo)),
                added,
                to,
                scales,
            )

    def _gemm(self, a: Parts, b: Parts, to: MatrixStack, adds: bool) -> HopperGemm:
        columns = _columns(to, self.device.multiprocessors)
        key = a.format.name, columns, a.k_major, b.k_major, adds
        if key not in self._gemms:
            tile = HopperTile(
                "float16" if a.format.scaled else "tfloat32",
                "float32",
                columns,
                "k" if a.k_major else "m",
                "k" if b.k_major else "n",
                products=3,
                adds=adds,
                scaled=a.format.scaled,
            )
            self._gemms[key] = HopperGemm(tile, self.device)
        return self._gemms[key]


class Tf32x3Kernel(Fp16x3Kernel):
    """Halves in TF32: half as fast, and right for nearly any numbers."""

    name = "tf32x3"
    form = TF32_PAIR
    first = Way.TF32X3


def _columns(to: MatrixStack, multiprocessors: int) -> int:
    """Return how wide tiles should be: 192 and 128 columns run at one rate, so the better division of work decides."""

    def cost(columns: int) -> float:
        tiles = -(-to.rows // ROWS) * -(-to.columns // columns) * to.matrices
        return -(-tiles // multiprocessors) * columns / (0.6 if columns == 64 else 1.0)

    return min((192, 128, 64), key=cost)


def _matrices(own: tuple[int, ...], batch: tuple[int, ...], index: tuple[int, ...]) -> tuple[int, int]:
    """Return which of an operand's matrices the products at ``index`` of the batch's first axes begin with.

    And how many there are along the last axis: 1 where it is broadcast.
    """
    own = (1,) * (len(batch) - len(own)) + own
    first = 0
    for size, place in zip(own, (*index, 0), strict=False):
        first = first * size + (place if size > 1 else 0)
    return first, own[-1] if own else 1


def _some(stack: MatrixStack, first: int, number: int) -> MatrixStack:
    return stack._replace(address=stack.address + first * stack.step, matrices=number)

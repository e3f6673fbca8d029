"""float64 and complex128 products on int8 tensor cores: of residues, each granule of k where its numbers allow it.

Operands are residues modulo 16 numbers (`distmm_kernels.emulation.residues`). The Hopper kernel multiplies all of them
as one batch, and reduces its sums as it stores them: a byte for each modulus and element of C. These residues are of an
integer, which is rounded once, scaled, and added to C. Its error is less than that of a chain of float64
multiply-adds. A granule is such a chain where a guard says that the error might be larger, and where it is short.

C is computed in parts, which bounds the memory of its residues: `WORKSPACE` is that of 100 tiles for each
multiprocessor. Granules that are always chains have no residues.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.emulation.moduli import MODULI, epilogue_multiplier
from distmm_kernels.emulation.residues import COLUMNS, FORMS, SHORTEST, THREADS, Residues, splitter
from distmm_kernels.emulation.splits import as_stack
from distmm_kernels.gemm.guarded import WORKSPACE, GuardedKernel, GuardedOperand, Way, parts
from distmm_kernels.kernel import Array
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.driver import loaded
from distmm_kernels.launch.hopper_launch import HopperGemm, Scales, hopper_gemm
from distmm_kernels.layout.stack import Stack, address
from distmm_kernels.layout.vectors import row_pitch
from distmm_kernels.tiles.hopper_tiles import ROWS, HopperTile, best_columns

__all__ = ["ComplexResidueKernel", "ResidueKernel", "ResidueOperand", "split_steps", "strip"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ResidueOperand(GuardedOperand):
    """A prepared operand: itself, and the residues of the granules that are not too short."""

    residues: Residues

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, those of the operand itself included."""
        return int(self.matrices.nbytes) + self.residues.nbytes


class ResidueKernel(GuardedKernel):
    """float64 by residues, by multiply-adds where a guard is raised.

    Attributes
    ----------
    parts
        Real numbers of an element.
    reconstruction
        The kernel that makes elements of C of the residues of products.
    """

    name = "residues"
    shortest = SHORTEST
    parts: ClassVar[int] = 1
    reconstruction: ClassVar[str] = "distmm_kernels.device_code.reconstruct:reconstruct"

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self._split = splitter(device, self.parts)
        self._gemms: dict[tuple[int, int], HopperGemm] = {}

    def _format(self, block: Array, operand: str) -> ResidueOperand:
        matrices = self._matrices(block, operand)
        residues, found = self._split(as_stack(matrices[..., : split_steps(matrices.shape[-1])]))
        return ResidueOperand(shape=block.shape, matrices=matrices, found=found, residues=residues)

    def _check(self, operand: Any, name: str) -> None:
        if not isinstance(operand, ResidueOperand):
            raise TypeError(f"{name} was not prepared by {self.name}: prepare it with this kernel first")

    def _expected(self, k: int) -> tuple[Way, ...]:
        lengths = (min(GRANULE, k - start) for start in range(0, k, GRANULE))
        return tuple(Way.RESIDUES if length >= SHORTEST else Way.IEEE for length in lengths)

    def _way(self, a: ResidueOperand, b: ResidueOperand, index: int) -> Way:
        return Way.IEEE if a.found.guards[index] or b.found.guards[index] else Way.RESIDUES

    def _chain(self, ways: tuple[Way, ...], a: ResidueOperand, b: ResidueOperand, c: Array | None, d: Array) -> None:
        for index, way in enumerate(ways):
            if way is Way.IEEE:
                self._by_multiply_adds(index, a, b, c, d)
            else:
                numbers = [_numbers(operand.matrices.shape[:-2], d.shape[:-2]) for operand in (a, b)]
                for place in np.ndindex(d.shape[:-2]):
                    mine, yours = (int(number[place]) for number in numbers)
                    self._by_residues(index, a, mine, b, yours, None if c is None else c[place], d[place])
            c = d

    def _by_residues(
        self, index: int, a: ResidueOperand, mine: int, b: ResidueOperand, yours: int, c: Array | None, d: Array
    ) -> None:
        """Add one granule of one matrix's product."""
        left, right = a.residues.granule(index, mine), b.residues.granule(index, yours)
        row_factors, column_factors = a.residues.factors(index, mine), b.residues.factors(index, yours)
        m, n = d.shape
        rows, columns = strip(m, n, left.matrices)
        memory = self._module.cuda.alloc(left.matrices * rows * row_pitch(columns, 1))
        to_c = (0, 0, 0) if c is None else (address(c), *c.strides)
        kernel = loaded(Recipe(self.reconstruction, (c is not None,)), self.device)
        for down, across in parts(m, n, rows, columns):
            high, wide = down.stop - down.start, across.stop - across.start
            pitch = row_pitch(wide, 1)
            to = Stack(memory.ptr, (left.matrices, high, wide), (high * pitch, pitch, 1), 1)
            of_a = left.rows_from(down.start, high)
            of_b = right.rows_from(across.start, wide)
            self._gemm(high, wide)((of_a,), (of_b,), None, to, Scales(self._moduli.data.ptr, 8, 0, 0))
            values = (
                *(to.address, to.step, pitch, row_factors + 8 * down.start, column_factors + 8 * across.start),
                *(address(d) + down.start * d.strides[0] + across.start * d.strides[1], d.strides[0]),
                *(to_c[0] + down.start * to_c[1] + across.start * to_c[2], to_c[1], to_c[2]),
                *(high, wide),
            )
            kernel.launch((-(-high * -(-wide // COLUMNS) // THREADS), 1, 1), (), values)

    def _gemm(self, m: int, n: int) -> HopperGemm:
        if (m, n) not in self._gemms:
            best = best_columns(m, n, FORMS[self.parts] * len(MODULI), 1, self.device.multiprocessors)
            columns = 128 if best <= 128 else 256  # whole boxes of bytes
            self._gemms[m, n] = hopper_gemm(HopperTile("int8", "int8", columns, b_major="k"), self.device)
        return self._gemms[m, n]

    @functools.cached_property
    def _moduli(self) -> Array:
        """Modulus and its multiplier of each product, on the device."""
        table = [(modulus, epilogue_multiplier(modulus)) for modulus in MODULI] * FORMS[self.parts]
        made = self._module.asarray(np.array(table, np.uint32))
        self._complete()  # other threads' streams read it too
        return made


class ComplexResidueKernel(ResidueKernel):
    """complex128 by residues, which takes three products: sums of residues are exact, as those of numbers are not."""

    name = "complex_residues"
    parts = 2
    reconstruction = "distmm_kernels.device_code.reconstruct_complex:reconstruct"


def split_steps(k: int) -> int:
    """Return how many steps of k have residues: not those of a short granule at the end."""
    last = k % GRANULE
    return k if last >= SHORTEST else k - last


def strip(m: int, n: int, products: int = len(MODULI)) -> tuple[int, int]:
    """Return how many rows and columns of C are worked on at a time: all columns, unless 128 rows of them are many."""
    columns = min(n, max(2 * ROWS, WORKSPACE // (products * ROWS) // (2 * ROWS) * 2 * ROWS))
    rows = WORKSPACE // (products * row_pitch(columns, 1)) // ROWS * ROWS
    return min(m, max(rows, ROWS)), columns


def _numbers(own: tuple[int, ...], batch: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return which of an operand's matrices takes part in each product of a batch."""
    return np.broadcast_to(np.arange(math.prod(own)).reshape(own), batch)

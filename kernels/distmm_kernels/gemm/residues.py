"""float64 products on int8 tensor cores: sixteen products of residues, each granule of k where its numbers allow it.

Operands are residues modulo 16 numbers (`distmm_kernels.emulation.residues`). The Hopper kernel multiplies all of them
as one batch, and reduces its sums as it stores them: a byte for each modulus and element of C. These residues are of an
integer, which is rounded once, scaled, and added to C. Its error is less than that of a chain of float64
multiply-adds; where a guard says that it might not be, and where a granule is short, a granule is such a chain.

C is worked on in strips of rows, so that its residues take a bounded amount of memory.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.emulation.moduli import MODULI, epilogue_multiplier
from distmm_kernels.emulation.residues import COLUMNS, SHORTEST, THREADS, Residues, splitter
from distmm_kernels.emulation.splits import as_stack
from distmm_kernels.gemm.guarded import GuardedKernel, GuardedOperand, Way
from distmm_kernels.kernel import Array
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.driver import loaded
from distmm_kernels.launch.hopper_launch import HopperGemm, Scales, hopper_gemm
from distmm_kernels.layout.stack import Stack, address
from distmm_kernels.layout.vectors import row_pitch
from distmm_kernels.tiles.hopper_tiles import ROWS, HopperTile, best_columns

__all__ = ["WORKSPACE", "ResidueKernel", "ResidueOperand", "strip"]

WORKSPACE = 1 << 29  # bytes of residues of C at a time, if 128 rows have no more: work for 100 rounds of all processors


@dataclass(frozen=True, eq=False, kw_only=True)
class ResidueOperand(GuardedOperand):
    """A prepared operand: itself, and its residues."""

    residues: Residues

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, those of the operand itself included."""
        return int(self.matrices.nbytes) + self.residues.nbytes


class ResidueKernel(GuardedKernel):
    """float64 by residues, by multiply-adds where a guard is raised."""

    name = "residues"

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self._split = splitter(device)
        self._gemms: dict[tuple[int, int], HopperGemm] = {}

    def _format(self, block: Array, operand: str) -> ResidueOperand:
        block = block.astype(self.dtype, copy=False)
        matrices = block if operand == "A" else block.swapaxes(-1, -2)
        residues, found = self._split(as_stack(matrices))
        return ResidueOperand(shape=block.shape, matrices=matrices, found=found, residues=residues)

    def _check(self, operand: Any, name: str) -> None:
        if not isinstance(operand, ResidueOperand):
            raise TypeError(f"{name} is no operand that {self.name} has prepared: prepare it with this kernel first")

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
                numbers = [_numbers(operand.shape[:-2], d.shape[:-2]) for operand in (a, b)]
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
        pitch, rows = row_pitch(n, 1), strip(m, n)
        memory = self._module.cuda.alloc(len(MODULI) * rows * pitch)
        to_c = (0, 0, 0) if c is None else (address(c), *c.strides)
        kernel = loaded(Recipe("distmm_kernels.device_code.reconstruct:reconstruct", (c is not None,)), self.device)
        for first in range(0, m, rows):
            here = min(rows, m - first)
            to = Stack(memory.ptr, (len(MODULI), here, n), (here * pitch, pitch, 1), 1)
            part = left._replace(address=left.address + first * left.pitch, shape=(left.matrices, here, left.columns))
            self._gemm(here, n)((part,), (right,), None, to, Scales(self._moduli.data.ptr, 8, 0, 0))
            values = (
                *(to.address, to.step, pitch, row_factors + 8 * first, column_factors),
                *(address(d) + first * d.strides[0], d.strides[0]),
                *(to_c[0] + first * to_c[1], to_c[1], to_c[2]),
                *(here, n),
            )
            kernel.launch((-(-here * -(-n // COLUMNS) // THREADS), 1, 1), (), values)

    def _gemm(self, m: int, n: int) -> HopperGemm:
        if (m, n) not in self._gemms:
            best = best_columns(m, n, len(MODULI), 1, self.device.multiprocessors)
            columns = 128 if best <= 128 else 256  # whole boxes of bytes
            self._gemms[m, n] = hopper_gemm(HopperTile("int8", "int8", columns, b_major="k"), self.device)
        return self._gemms[m, n]

    @functools.cached_property
    def _moduli(self) -> Array:
        """Moduli and their multipliers, on the device."""
        table = [(modulus, epilogue_multiplier(modulus)) for modulus in MODULI]
        made = self._module.asarray(np.array(table, np.uint32))
        self._complete()  # other threads' streams read it too
        return made


def strip(m: int, n: int) -> int:
    """Return how many rows of C are worked on at a time."""
    rows = WORKSPACE // (len(MODULI) * row_pitch(n, 1)) // ROWS * ROWS
    return min(m, max(rows, ROWS))


def _numbers(own: tuple[int, ...], batch: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return which of an operand's matrices takes part in each product of a batch."""
    return np.broadcast_to(np.arange(math.prod(own)).reshape(own), batch)

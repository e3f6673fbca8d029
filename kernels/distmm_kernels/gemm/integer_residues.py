"""int32 and int64 products on int8 tensor cores, as products of residues: exact modulo 2^32 and 2^64.

Integers of 16 bits are multiplied as int32, and unsigned ones as the signed ones of their width, which have the same
bits. If k is short, multiply-adds are used instead: residues would take 2.5 times the memory of an operand, and
passes over C most of the time. The k from which residues are faster has not been measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from distmm_kernels.candidate import Candidate
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import granules
from distmm_kernels.emulation.integers import SHORTEST, SYSTEMS, split_integers
from distmm_kernels.emulation.launches import as_stack
from distmm_kernels.gemm.aligned import AlignedKernel
from distmm_kernels.gemm.guarded import WORKSPACE
from distmm_kernels.gemm.operands import Shareable
from distmm_kernels.gemm.register_tiled import RegisterTiledKernel
from distmm_kernels.gemm.residue_products import Instruction, ResidueProducts, rows
from distmm_kernels.kernel import Array
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.layout.stack import distinct
from distmm_kernels.tiles.hopper_tiles import COORDINATES


class IntegerResidueKernel(AlignedKernel):
    """int32 by ten products of residues, int64 by eighteen; both by `register_tiled` if k is less than `SHORTEST`."""

    name = "integer_residues"
    granule = 1  # exact
    instruction: ClassVar[Instruction] = "wgmma"

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self.bits, self.reads = 8 * self.accumulator.itemsize, (f"residues of {self.dtype}",)
        recipe = Recipe("distmm_kernels.device_code.integer_residues:reconstruct", (self.bits,))
        self._products = ResidueProducts(device, SYSTEMS[self.bits].moduli, recipe, self.instruction)
        self._short = RegisterTiledKernel(problem, device)

    def _format(self, block: Array, operand: str) -> Any:
        if block.shape[-1 if operand == "A" else -2] < SHORTEST:
            return self._short._format(block, operand)
        own = distinct(block).astype(self.dtype, copy=False)
        residues = split_integers(as_stack(own if operand == "A" else own.swapaxes(-1, -2)), self.bits, self.device)
        return Shareable(shape=block.shape, format=self.reads[0], made=residues, batch=own.shape[:-2])

    def _check(self, operand: Any, name: str) -> None:
        if operand.shape[-1 if name == "a" else -2] < SHORTEST:
            self._short._check(operand, name)
        else:
            super()._check(operand, name)

    def _accumulate(self, a: Any, b: Any, c: Array | None, d: Array, symmetric: bool = False) -> None:
        if not isinstance(a, Shareable):
            self._short._accumulate(a, b, c, d)
            return
        for index in range(granules(a.shape[-1])):
            self._products.add_granule(index, a, b, c, d, symmetric)
            c = d

    def _triangle(self, a: Any, b: Any, c: Array | None, d: Array) -> bool:
        self._accumulate(a, b, c, d, symmetric=True)
        return False


_INTEGERS = partial(
    Candidate,
    dtypes=frozenset({"int32", "int64"}),
    precision="ieee",
    tile=(128, 128),
    prepared=2.5,  # 10 bytes for each of 4, or 18 for each of 8
    workspace=WORKSPACE,  # residues of a part of C
    passes=(26, 44),  # of int64: 8 in, 18 out; 18 out, 18 in, 8 out
    products=10,  # or 18
    side_by_side=False,
    sizes_below=COORDINATES,
)

TABLE = rows(_INTEGERS, "ten or eighteen products of int8 residues", IntegerResidueKernel)

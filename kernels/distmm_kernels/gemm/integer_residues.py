"""int32 and int64 products on int8 tensor cores, as products of residues: exact modulo 2^32 and 2^64.

Integers of 16 bits are multiplied as int32, and unsigned ones as the signed ones of their width, which have the same
bits. If k is short, multiply-adds are used instead: residues would take 2.5 times the memory of an operand, and
passes over C most of the time. The k from which residues are faster has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from distmm_kernels.candidate import Candidate
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import granules
from distmm_kernels.emulation.integers import SYSTEMS, split_integers
from distmm_kernels.emulation.launches import as_stack
from distmm_kernels.emulation.residues import SHORTEST, Residues
from distmm_kernels.gemm.aligned import AlignedKernel
from distmm_kernels.gemm.guarded import WORKSPACE
from distmm_kernels.gemm.register_tiled import RegisterTiledKernel
from distmm_kernels.gemm.residue_products import Instruction, ResidueProducts, matrices_of, rows
from distmm_kernels.kernel import Array
from distmm_kernels.layout.stack import distinct
from distmm_kernels.tiles.hopper_tiles import COORDINATES


@dataclass(frozen=True, eq=False)
class IntegerOperand:
    """A prepared operand.

    Attributes
    ----------
    shape
        ``(*batch, m, k)`` or ``(*batch, k, n)``.
    batch
        Batch dimensions of the residues. Broadcast matrices are kept once.
    residues
        Of rows of A, or of columns of B.
    bits
        Bits of the integers, 32 or 64.
    """

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    residues: Residues
    bits: int

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.residues.nbytes


class IntegerResidueKernel(AlignedKernel):
    """int32 by ten products of residues, int64 by eighteen; both by `register_tiled` if k is less than `SHORTEST`."""

    name = "integer_residues"
    granule = 1  # exact
    instruction: ClassVar[Instruction] = "wgmma"

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self.bits = 8 * self.accumulator.itemsize
        reconstruction = "distmm_kernels.device_code.integer_residues:reconstruct"
        moduli = SYSTEMS[self.bits].moduli
        self._products = ResidueProducts(device, moduli, reconstruction, (self.bits,), self.instruction)
        self._short = RegisterTiledKernel(problem, device)

    def _format(self, block: Array, operand: str) -> Any:
        if block.shape[-1 if operand == "A" else -2] < SHORTEST:
            return self._short._format(block, operand)
        own = distinct(block).astype(self.dtype, copy=False)
        residues = split_integers(as_stack(own if operand == "A" else own.swapaxes(-1, -2)), self.bits, self.device)
        return IntegerOperand(block.shape, own.shape[:-2], residues, self.bits)

    def _check(self, operand: Any, name: str) -> None:
        if operand.shape[-1 if name == "a" else -2] < SHORTEST:
            self._short._check(operand, name)
        elif not isinstance(operand, IntegerOperand) or operand.bits != self.bits:
            raise TypeError(
                f"{name} was not prepared by {self.name} of {self.dtype}: prepare it with this kernel first"
            )

    def _accumulate(self, a: Any, b: Any, c: Array | None, d: Array, symmetric: bool = False) -> None:
        if not isinstance(a, IntegerOperand):
            self._short._accumulate(a, b, c, d)
            return
        for index in range(granules(a.shape[-1])):
            for place, mine, yours in matrices_of(a.batch, b.batch, d.shape[:-2]):
                left, right = a.residues.granule(index, mine), b.residues.granule(index, yours)
                self._products.add(left, right, None if c is None else c[place], d[place], symmetric=symmetric)
            c = d

    def _transposed(self, a: Any) -> Any | None:
        if not isinstance(a, IntegerOperand):
            return None
        return replace(a, shape=(*a.shape[:-2], a.shape[-1], a.shape[-2]))

    def _triangle(self, a: Any, b: Any, c: Array | None, d: Array) -> bool:
        self._accumulate(a, b, c, d, symmetric=True)
        return False


class MmaSyncIntegerResidueKernel(IntegerResidueKernel):
    """int32 by ten products of residues, int64 by eighteen, on any GPU since Ampere."""

    name = "mma_sync_integer_residues"
    instruction = "mma.sync"


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

TABLE = rows(_INTEGERS, "ten or eighteen products of int8 residues", IntegerResidueKernel, MmaSyncIntegerResidueKernel)

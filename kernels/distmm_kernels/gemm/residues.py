"""float64 and complex128 products on int8 tensor cores, by residues, in each granule of k whose numbers allow it.

Operands are residues modulo 15 numbers (`distmm_kernels.emulation.residues`), and so are their products
(`distmm_kernels.gemm.residue_products`). They determine an integer, which is rounded once, scaled, and added to C.
The error of each element is less than the bound of a chain of float64 multiply-adds, and mostly far less than the error
of one. A granule is computed by such a chain if a guard says that the bound might be exceeded, or if the granule is
short. Short granules have no residues.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from distmm_kernels.candidate import FAST_FLOAT64, Candidate
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.emulation.moduli import MODULI
from distmm_kernels.emulation.residues import FORMS, SHORTEST, splitter
from distmm_kernels.gemm.guarded import WORKSPACE, GuardedKernel, Way
from distmm_kernels.gemm.residue_products import Instruction, ResidueProducts, rows
from distmm_kernels.kernel import Array
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.symmetric import Symmetry
from distmm_kernels.tiles.hopper_tiles import COORDINATES


class ResidueKernel(GuardedKernel):
    """float64 by residues, or by multiply-adds if a guard is raised.

    Attributes
    ----------
    parts
        Real numbers of an element: 1, or 2 for complex numbers.
    reconstruction
        The kernel that computes elements of C from the residues of products.
    instruction
        The one that multiplies residues.
    """

    name = "residues"
    shortest: ClassVar[int] = SHORTEST
    first = Way.RESIDUES
    parts: ClassVar[int] = 1
    reconstruction: ClassVar[str] = "distmm_kernels.device_code.reconstruct:reconstruct"
    instruction: ClassVar[Instruction] = "wgmma"

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self.reads = (f"residues of {self.dtype}",)
        self._split = splitter(device, self.parts)
        recipe = Recipe(self.reconstruction, (device.compute_capability not in FAST_FLOAT64,))  # few float64 units
        self._products = ResidueProducts(device, MODULI * FORMS[self.parts], recipe, self.instruction)

    def _splittable(self, matrices: Array) -> Array:
        return matrices[..., : split_steps(matrices.shape[-1], self.shortest)]

    def _chain(self, ways: tuple[Way, ...], a: Any, b: Any, c: Array | None, d: Array, symmetric: bool = False) -> None:
        for index, way in enumerate(ways):
            if way is Way.IEEE:
                self._by_multiply_adds(index, a, b, c, d)
            else:
                self._products.add_granule(index, a, b, c, d, symmetric, b.conjugated)
            c = d


class ComplexResidueKernel(ResidueKernel):
    """complex128 by residues, with three real products. These lose no accuracy, since sums of residues are exact."""

    name = "complex_residues"
    parts, shortest = 2, SHORTEST // 2
    reconstruction = "distmm_kernels.device_code.reconstruct_complex:reconstruct"

    def turned(self, a: Any, symmetry: Symmetry) -> Any:
        """Return a prepared A, transposed, or conjugated and transposed, as a prepared B in the same memory."""
        return replace(a.transposed, conjugated=symmetry == "hermitian")


def split_steps(k: int, shortest: int) -> int:
    """Return how many steps of k have residues: all but those of a granule at the end with fewer than the shortest."""
    last = k % GRANULE
    return k if last >= shortest else k - last


# The workspace holds the residues of a part of C, and after that the copies which a raised guard demands.
_BY_RESIDUES = partial(Candidate, precision="highest", tile=(128, 128), workspace=WORKSPACE, side_by_side=False)
_FLOAT64 = partial(
    _BY_RESIDUES,
    dtypes=frozenset({"float64"}),
    products=len(MODULI),
    # 15 bytes for each of 8, 12 for each granule of a row, and while they are made 8 for 128 elements; a granule has
    # 1024 elements or more
    prepared=1.886,
    passes=(31, 38),  # two times 8 in, 15 out; 15 out, 15 in, 8 out
    sizes_below=COORDINATES,
)
_COMPLEX128 = partial(
    _BY_RESIDUES,
    dtypes=frozenset({"complex128"}),
    products=3 * len(MODULI),
    prepared=2.824,  # 45 bytes for each of 16, 12 for each granule, 8 for 64 elements
    passes=(77, 106),  # two times 16 in, 45 out; 45 out, 45 in, 16 out
    sizes_below=COORDINATES // 2,
)

TABLE = (
    *rows(_FLOAT64, "fifteen products of int8 residues", ResidueKernel),
    *rows(_COMPLEX128, "three times fifteen products of int8 residues", ComplexResidueKernel),
)

"""float64, complex128, int32 and int64 by residues and the `mma.sync` kernel: on any GPU since Ampere.

Operands, guards, moduli and reconstruction are those of `residues` and `integer_residues`. All sums of residues are
exact, so results have the same bits as there.
"""

from __future__ import annotations

from typing import Any

from distmm_kernels.candidate import AMPERE
from distmm_kernels.gemm.integer_residues import INTEGERS_IDEA, IntegerResidueKernel, Integers
from distmm_kernels.gemm.residues import (
    COMPLEX128_IDEA,
    FLOAT64_IDEA,
    Complex128,
    ComplexResidueKernel,
    Float64,
    ResidueKernel,
)


class MmaSyncResidueKernel(ResidueKernel):
    """float64 by residues, or by multiply-adds if a guard is raised."""

    name = "mma_sync_residues"
    instruction = "mma.sync"


class MmaSyncComplexResidueKernel(ComplexResidueKernel):
    """complex128 by residues, with three real products."""

    name = "mma_sync_complex_residues"
    instruction = "mma.sync"


class MmaSyncIntegerResidueKernel(IntegerResidueKernel):
    """int32 by ten products of residues, int64 by eighteen."""

    name = "mma_sync_integer_residues"
    instruction = "mma.sync"


# what the rows of these kernels have in common
_BY_MMA_SYNC: dict[str, Any] = {"capabilities": AMPERE, "unit": "mma_sync"}
_UNITS = "on tensor cores fed by ldmatrix"

TABLE = (
    Float64(MmaSyncResidueKernel, f"{FLOAT64_IDEA}, {_UNITS}", **_BY_MMA_SYNC),
    Complex128(MmaSyncComplexResidueKernel, f"{COMPLEX128_IDEA}, {_UNITS}", **_BY_MMA_SYNC),
    Integers(MmaSyncIntegerResidueKernel, f"{INTEGERS_IDEA}, {_UNITS}", **_BY_MMA_SYNC),
)

"""Products of float32 on Hopper's tensor cores, with operands rounded to TF32 or to bfloat16."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import ml_dtypes

from distmm_kernels.gemm.hopper import ON_HOPPER, HopperKernel
from distmm_kernels.kernel import Array
from distmm_kernels.tiles import slices
from distmm_kernels.tiles.hopper_tiles import OperandFormat


class HopperTf32Kernel(HopperKernel):
    """float32 operands, which the TMA rounds to nearest to 11 significant bits (TF32) as it loads them."""

    name = "hopper_tf32"
    formats: ClassVar[dict[str, OperandFormat]] = {"float32": "tfloat32"}


class HopperBf16Kernel(HopperKernel):
    """float32 operands rounded to bfloat16."""

    name = "hopper_bf16"
    formats: ClassVar[dict[str, OperandFormat]] = {"float32": "bfloat16"}

    def _converted(self, block: Array) -> Array:
        return block.astype(self.dtype, copy=False).astype(ml_dtypes.bfloat16)


_FLOAT32 = frozenset({"float32"})
_ROUNDED = partial(ON_HOPPER, dtypes=_FLOAT32, workspace=slices.WORKSPACE, triangles=_FLOAT32)
TABLE = (
    _ROUNDED(HopperBf16Kernel, "operands rounded to bfloat16, on tensor cores", precision="medium", prepared=0.5),
    _ROUNDED(HopperTf32Kernel, "operands rounded to TF32, on tensor cores", precision="high", prepared=1.0),
)

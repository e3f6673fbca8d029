"""Products of 8-bit floats on Hopper's tensor cores, also with factors of rows, columns and blocks of k."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from distmm_kernels.config import FLOAT8
from distmm_kernels.gemm.hopper import ON_HOPPER, HopperKernel
from distmm_kernels.gemm.operands import Operand
from distmm_kernels.kernel import Array, product_shape
from distmm_kernels.launch.hopper_launch import Scales
from distmm_kernels.layout.float8 import native
from distmm_kernels.layout.stack import Stack, address
from distmm_kernels.tiles.hopper_tiles import STRETCH_OF_FLOAT8, OperandFormat


class HopperFloat8Kernel(HopperKernel):
    """8-bit floats of either type, accumulated in float32.

    The tensor cores' sums keep 13 bits. Each sum of `STRETCH_OF_FLOAT8` steps of k is added to C by a float32 addition.
    """

    name = "hopper_float8"
    takes_float8 = True
    granule = STRETCH_OF_FLOAT8
    formats: ClassVar[dict[str, OperandFormat]] = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}

    def _format(self, block: Array, operand: str) -> Operand:
        return replace(super()._format(block, operand), format=self.formats[native(block.dtype).name])

    def _converted(self, block: Array) -> Array:
        return block.view(np.uint8)

    def multiply_scaled(self, a: Operand, b: Operand, rows: Array, columns: Array, dtype: np.dtype[Any]) -> Array:
        """Return the product of one matrix each, with factors of rows and columns, once its launch is enqueued.

        Parameters
        ----------
        a, b
            Prepared ``(m, k)`` and ``(k, n)``; no size is 0.
        rows, columns
            ``(1, m)`` and ``(1, n)``, or as many rows as there are `STRETCH_OF_FLOAT8` steps in k: the product of these
            steps has factors of its own.
        dtype
            float32, float16 or bfloat16.
        """
        self._check(a, "a")
        self._check(b, "b")
        with self._on_device():
            d = self._empty(product_shape(a.shape, b.shape), dtype)
            to, factors = Stack.for_tensor_map(d), [self._factors_in_memory(x) for x in (rows, columns)]
            kind = "scaled" if len(rows) == len(columns) == 1 else "scaled_blocks"
            gemm = self._gemm(a, b, to, dtype, promotes=True, **{kind: True})
            of_rows, of_columns = ((address(x), x.strides[0] if len(x) > 1 else 0) for x in factors)
            gemm(a.stacks, b.stacks, None, to, Scales(*of_rows, *of_columns))
        return d

    def _factors_in_memory(self, factors: Array) -> Array:
        """Return float32 factors with the words after each row that `Scales` asks for."""
        stages, count = factors.shape
        whole = self._module.empty((stages, -(-count // 4) * 4 + 256), np.float32)
        whole[:, :count] = factors
        return whole


TABLE = (
    ON_HOPPER(
        HopperFloat8Kernel,
        "8-bit floats on tensor cores",
        frozenset(dtype.name for dtype in FLOAT8),
        "high",
        prepared=1.0,  # A or B whose k is not contiguous
        in_place=dict.fromkeys((dtype.name for dtype in FLOAT8), "A"),
        one_launch=frozenset(dtype.name for dtype in FLOAT8),
        triangles=frozenset(dtype.name for dtype in FLOAT8),
    ),
)

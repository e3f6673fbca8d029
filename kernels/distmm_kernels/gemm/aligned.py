"""Matrices whose rows are aligned, as the tensor memory accelerator loads and stores them."""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm_kernels.kernel import Array
from distmm_kernels.launch.launches import CudaKernel
from distmm_kernels.layout.stack import VECTOR_BYTES, Stack
from distmm_kernels.layout.vectors import in_vectors

__all__ = ["AlignedKernel"]


class AlignedKernel(CudaKernel):
    """Rows of D begin at multiples of the alignment."""

    def _rows(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array whose rows begin at multiples of the alignment."""
        multiple = VECTOR_BYTES // dtype.itemsize
        columns = -(-shape[-1] // multiple) * multiple
        whole = self._module.empty((*shape[:-1], columns), dtype)
        return whole if columns == shape[-1] else whole[..., : shape[-1]]

    def _loadable(self, c: Array | None) -> Array | None:
        """Return C, or a copy where the tensor memory accelerator cannot read it."""
        return c if c is None or Stack.of(c).loadable() else in_vectors(c, self.device)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self._rows(shape, dtype)

"""Matrices whose rows are aligned, as the tensor memory accelerator loads and stores them."""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm_kernels.kernel import Array
from distmm_kernels.launch import CudaKernel
from distmm_kernels.tensor_map import ALIGNMENT
from distmm_kernels.vectors import in_vectors

__all__ = ["AlignedKernel", "contiguous", "legal"]


class AlignedKernel(CudaKernel):
    """Rows of D begin at multiples of the alignment."""

    def _rows(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array whose rows begin at multiples of the alignment."""
        multiple = ALIGNMENT // dtype.itemsize
        columns = -(-shape[-1] // multiple) * multiple
        whole = self._module.empty((*shape[:-1], columns), dtype)
        return whole if columns == shape[-1] else whole[..., : shape[-1]]

    def _loadable(self, c: Array | None) -> Array | None:
        """Return C, or a copy where the tensor memory accelerator cannot read it."""
        return c if c is None or legal(c) else in_vectors(c, self.device)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self._rows(shape, dtype)


def legal(array: Array) -> bool:
    """Whether the tensor memory accelerator can read the rows of these matrices where they lie."""
    if not contiguous(array):
        return False
    shape, (*batch, pitch, _) = array.shape, array.strides
    row = shape[-1] * array.itemsize
    if shape[-2] == 1:
        pitch = -(-row // ALIGNMENT) * ALIGNMENT  # there is no next row
    if (array.data.ptr | pitch) % ALIGNMENT or not row <= pitch < 2**40:
        return False
    return all(step % ALIGNMENT == 0 and step >= 0 for step in batch)


def contiguous(array: Array) -> bool:
    """Whether the elements of a row are neighbours."""
    return bool(array.strides[-1] == array.itemsize or array.shape[-1] == 1)

"""Results whose rows are aligned, as the tensor memory accelerator stores them."""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm_kernels.kernel import Array
from distmm_kernels.launch import CudaKernel
from distmm_kernels.tensor_map import ALIGNMENT

__all__ = ["AlignedKernel", "addable", "contiguous"]


class AlignedKernel(CudaKernel):
    """Rows of D begin at multiples of the alignment."""

    def _rows(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array whose rows begin at multiples of the alignment."""
        multiple = ALIGNMENT // dtype.itemsize
        columns = -(-shape[-1] // multiple) * multiple
        whole = self._module.empty((*shape[:-1], columns), dtype)
        return whole if columns == shape[-1] else whole[..., : shape[-1]]

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self._rows(shape, dtype)


def addable(c: Array) -> bool:
    """Whether the kernel can read this C where it lies."""
    *batch, pitch, _ = c.strides
    return contiguous(c) and all(number % 8 == 0 and number >= 0 for number in (c.data.ptr, pitch, *batch))


def contiguous(array: Array) -> bool:
    """Whether the elements of a row are neighbours."""
    return bool(array.strides[-1] == array.itemsize or array.shape[-1] == 1)

"""Rows of matrices in GPU memory for the kernels of reductions: in place, or copied in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch import driver
from distmm_kernels.layout.stack import address
from distmm_kernels.layout.vectors import in_vectors

COMPARED = ("float32", "float64", "int32", "int64")
WIDER = {"float16": "float32", "bfloat16": "float32"}  # the wider type has the same values in the same order
LONGEST = 2**31 - 1  # elements of a row

LANES = 32  # of a warp

PIECE_BYTES = 32 << 20
"""Size of a piece: rows that are copied at a time if the kernels cannot read them in place. The copy is still in the L2
cache (50 MB on an H200) when the kernel reads it."""


def compared(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the type in which elements are compared; None if there is no kernel for it."""
    name = WIDER.get(dtype.name, dtype.name)
    return np.dtype(name) if name in COMPARED else None


def pieces(x: Array, dtype: np.dtype[Any], device: Device) -> Iterator[tuple[tuple[Any, ...], Array]]:
    """Yield the index of each piece, and its rows ``(r, n)``, in the type that is compared. A launch gets one piece.

    The rows or the columns of a piece are contiguous. If those of `x` are, a whole matrix is one piece.
    """
    *batch, m, n = x.shape
    in_place = x.dtype == dtype and min(x.strides[-2:]) >= 0 and dtype.itemsize in x.strides[-2:]
    height = m if in_place else max(1, PIECE_BYTES // (n * dtype.itemsize))
    for index in np.ndindex(*batch):
        for top in range(0, m, height):
            at = *index, slice(top, min(m, top + height))
            yield at, x[at] if in_place else in_vectors(x[at], device).astype(dtype, copy=False)


def span(rows: Array) -> tuple[int, ...]:
    """Return the arguments of a kernel for rows: a vector from their first element to their last one."""
    ends = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.strides, strict=True))
    return vector(rows, ends // rows.itemsize + 1)


def vector(array: Array, size: int) -> tuple[int, ...]:
    """Return the arguments of a kernel for contiguous elements."""
    return driver.array_arguments(address(array), (size,), (array.itemsize,), array.itemsize)

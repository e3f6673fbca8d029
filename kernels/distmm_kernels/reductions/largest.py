"""The k largest elements of each row of matrices in GPU memory, and their columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch import driver
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.layout.stack import address
from distmm_kernels.layout.vectors import in_vectors

__all__ = ["MOST", "PIECE_BYTES", "largest", "suits"]

MOST = 128
"""Greatest k: the best elements of a row are in registers."""

PIECE_BYTES = 32 << 20
"""Of rows that are copied at a time, where the kernels do not read them in place: the copy is still in the second-level
cache (50 MB on an H200) when it is read."""

COMPARED = ("float32", "float64", "int32", "int64")
WIDER = {"float16": "float32", "bfloat16": "float32"}  # same values, same order
MAKER = "distmm_kernels.device_code.largest:"
LANES = 32
WARPS = 4  # of a block
HELD_BYTES = 32  # of a row that a lane compares at a time
WARPS_OF_COLUMNS, HELD_OF_COLUMN = 16, 4  # warps of a block; elements of a column


def suits(dtype: np.dtype[Any], k: int, columns: int) -> bool:
    """Whether `largest` can find the k largest of rows of so many elements of this type."""
    return (dtype.name in COMPARED or dtype.name in WIDER) and 1 <= k <= min(MOST, columns) and columns < 1 << 31


def largest(x: Array, k: int, device: Device, weighing: str = "", weights: Array | None = None) -> tuple[Array, Array]:
    """Return the k largest elements of each row, in descending order, and their columns; equal ones by column.

    Runs on CuPy's current stream.

    Parameters
    ----------
    x : cupy.ndarray ``(*batch, m, n)``
        Of a type and size that it `suits`, with any strides.
    k : int
    device : Device
        Where `x` lies.
    weighing : {"", "plain", "times", "minus"}
        What is compared: ``x``, where NaN is larger than any number; or ``x``, ``x * weights`` or ``x - weights``,
        where NaN counts as minus infinity. -0.0 equals 0.0.
    weights : cupy.ndarray ``(n,)``, optional
        Contiguous, of the type of `x`, which is float32 or float64.

    Returns
    -------
    values, columns : cupy.ndarray ``(*batch, m, k)``
        `values`, weighed, of the type of `x`, float16 and bfloat16 as float32; `columns` of type int64.
    """
    array, (*others, n) = type(x), x.shape
    dtype = np.dtype(WIDER.get(x.dtype.name, x.dtype))
    values, columns = array((*others, k), dtype), array((*others, k), np.int64)
    of_weights = _vector(x if weights is None else weights, dtype.itemsize, 0 if weights is None else n)
    for index in _pieces(x, dtype):
        rows = x[index]
        if not _in_place(rows, dtype):
            rows = in_vectors(rows, device).astype(dtype, copy=False)
        count = len(rows)
        kernel, blocks, pitch = _kernel(rows, k, weighing, device)
        span = ((count - 1) * rows.strides[0] + (n - 1) * rows.strides[1]) // dtype.itemsize + 1
        arguments = (
            *_vector(rows, dtype.itemsize, span),
            *of_weights,
            *_vector(values[index], dtype.itemsize, count * k),
            *_vector(columns[index], 8, count * k),
            *(pitch // dtype.itemsize, count, n, k),
        )
        kernel.launch((blocks, 1, 1), (), arguments)
    return values, columns


def _kernel(rows: Array, k: int, weighing: str, device: Device) -> tuple[driver.LoadedKernel, int, int]:
    """Return the kernel for rows as they lie, the blocks of its grid, and the bytes that it is told to step."""
    registers, name, size = -(-k // LANES), rows.dtype.name, rows.itemsize
    if rows.strides[1] == size:
        recipe = Recipe(f"{MAKER}of_rows", (name, weighing, registers, HELD_BYTES // size, LANES, WARPS))
        return driver.loaded(recipe, device), -(-len(rows) // WARPS), rows.strides[0]
    recipe = Recipe(f"{MAKER}of_columns", (name, weighing, registers, HELD_OF_COLUMN, LANES, WARPS_OF_COLUMNS))
    return driver.loaded(recipe, device), -(-len(rows) // WARPS_OF_COLUMNS), rows.strides[1]


def _vector(array: Array, itemsize: int, size: int) -> tuple[int, ...]:
    return driver.array_arguments(address(array), (size,), (itemsize,), itemsize)


def _pieces(x: Array, dtype: np.dtype[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the index of rows of one matrix that one launch takes: all of them, or as many as are copied at a time."""
    *batch, m, n = x.shape
    height = m if _in_place(x, dtype) else max(1, PIECE_BYTES // (n * dtype.itemsize))
    for index in np.ndindex(*batch):
        for top in range(0, m, height):
            yield *index, slice(top, min(m, top + height))


def _in_place(x: Array, dtype: np.dtype[Any]) -> bool:
    """Whether a kernel reads matrices: elements of a row, or of a column, are neighbours."""
    down, along = x.strides[-2:]
    return bool(x.dtype == dtype and min(down, along) >= 0 and dtype.itemsize in (down, along))

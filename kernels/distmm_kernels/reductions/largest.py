"""The k largest elements of each row of matrices in GPU memory, and their columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch import driver
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.reductions.lines import LANES, LONGEST, compared, pieces, span, vector

MOST = 128
"""The greatest k. The k largest elements of a row are held in registers."""

MAKER = "distmm_kernels.device_code.largest:"

# Warps of a thread block, and what a lane compares at a time: bytes of a row, or elements of a column. These are the
# fastest on an H200 (2026-11-23 and 27). With k = 15, a block of 62500 x 62500 float32 is read at 4.3 TB/s. With k = 11
# the rows of 40000 x 40000 take 1.64 ms and the columns 3.92, with half as many elements of a lane 5.05.
WARPS, HELD_BYTES = 4, 32
WARPS_OF_COLUMNS, HELD_OF_COLUMN = 16, 8


def suits(dtype: np.dtype[Any], k: int, columns: int) -> bool:
    """Whether `largest` supports this type, this k, and rows of this many columns."""
    return compared(dtype) is not None and 1 <= k <= min(MOST, columns) and columns <= LONGEST


def largest(x: Array, k: int, device: Device, weighing: str = "", weights: Array | None = None) -> tuple[Array, Array]:
    """Return the k largest elements of each row and their columns, in descending order. Equal elements are by column.

    Runs on CuPy's current stream.

    Parameters
    ----------
    x : cupy.ndarray ``(*batch, m, n)``
        Matrices that `suits` accepts, with any strides.
    k : int
    device : Device
        The device that has `x`.
    weighing : {"", "plain", "times", "minus"}
        What is compared. ``""``: ``x``, and NaN is larger than any number. The others: ``x``, ``x * weights`` or
        ``x - weights``, and NaN counts as minus infinity. -0.0 equals 0.0.
    weights : cupy.ndarray ``(n,)``, optional
        Contiguous, of the type of `x`, which is float32 or float64.

    Returns
    -------
    values, columns : cupy.ndarray ``(*batch, m, k)``
        `values` are the compared numbers, of the type of `x`; of float32 if `x` is float16 or bfloat16. `columns` are
        int64.
    """
    array, (*others, n), dtype = type(x), x.shape, compared(x.dtype)
    assert dtype is not None
    values, columns = array((*others, k), dtype), array((*others, k), np.int64)
    of_weights = vector(values, 0) if weights is None else vector(weights, n)
    for index, rows in pieces(x, dtype, device):
        count, by_columns = len(rows), rows.strides[1] != rows.itemsize
        kernel = driver.loaded(recipe(dtype, k, weighing, by_columns), device)
        blocks = -(-count // (WARPS_OF_COLUMNS if by_columns else WARPS))
        results = *vector(values[index], count * k), *vector(columns[index], count * k)
        arguments = *span(rows), *of_weights, *results, rows.strides[by_columns] // dtype.itemsize, count, n, k
        kernel.launch((blocks, 1, 1), arguments)
    return values, columns


def recipe(dtype: np.dtype[Any], k: int, weighing: str, by_columns: bool) -> Recipe:
    """Return the kernel for elements of this type in C order, or with `by_columns` in Fortran order."""
    by_rows = "of_rows", HELD_BYTES // dtype.itemsize, WARPS
    maker, held, warps = ("of_columns", HELD_OF_COLUMN, WARPS_OF_COLUMNS) if by_columns else by_rows
    return Recipe(MAKER + maker, (dtype.name, weighing, -(-k // LANES), held, LANES, warps))

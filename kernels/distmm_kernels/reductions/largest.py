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
"""Greatest k: the candidates of a row lie in shared memory."""

PIECE_BYTES = 32 << 20
"""Of rows that are copied at a time, because they are not contiguous or not of a type that is compared: the copy is
still in the second-level cache (50 MB on an H200) when it is read."""

COMPARED = ("float32", "float64", "int32", "int64")
WIDER = {"float16": "float32", "bfloat16": "float32"}  # same values, same order
MAKER = "distmm_kernels.device_code.largest:largest"
# Greatest k of a kernel, threads of its blocks, elements that each holds: the fastest on an H200 at k = 15 and 100
# (2.25 and 0.37 TB/s of float32, 2026-11-23).
SHAPES = ((32, 128, 8), (MOST, 256, 16))


def suits(dtype: np.dtype[Any], k: int, columns: int) -> bool:
    """Whether `largest` can find the k largest of rows of so many elements of this type."""
    return (dtype.name in COMPARED or dtype.name in WIDER) and 1 <= k <= min(MOST, columns) and columns < 1 << 32


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
    shape = next(each for each in SHAPES if k <= each[0])
    kernel = driver.loaded(Recipe(MAKER, (dtype.name, weighing, *shape)), device)
    of_weights = _vector(x if weights is None else weights, dtype.itemsize, 0 if weights is None else n)
    for index in _pieces(x, dtype):
        rows = _in_rows(x[index], dtype, device)
        count, pitch = len(rows), rows.strides[0] // dtype.itemsize
        arguments = (
            *_vector(rows, dtype.itemsize, (count - 1) * pitch + n),
            *of_weights,
            *_vector(values[index], dtype.itemsize, count * k),
            *_vector(columns[index], 8, count * k),
            *(pitch, n, k),
        )
        kernel.launch((count, 1, 1), (), arguments)
    return values, columns


def _vector(array: Array, itemsize: int, size: int) -> tuple[int, ...]:
    return driver.array_arguments(address(array), (size,), (itemsize,), itemsize)


def _pieces(x: Array, dtype: np.dtype[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the index of rows of one matrix that one launch takes: all of them, or as many as are copied at a time."""
    *batch, m, n = x.shape
    height = m if _lies_in_rows(x, dtype) else max(1, PIECE_BYTES // (n * dtype.itemsize))
    for index in np.ndindex(*batch):
        for top in range(0, m, height):
            yield *index, slice(top, min(m, top + height))


def _lies_in_rows(x: Array, dtype: np.dtype[Any]) -> bool:
    return bool(x.dtype == dtype and x.strides[-1] == x.itemsize and x.strides[-2] >= 0)


def _in_rows(x: Array, dtype: np.dtype[Any], device: Device) -> Array:
    """Return rows ``(r, n)`` of the type that is compared, whose elements are neighbours."""
    return x if _lies_in_rows(x, dtype) else in_vectors(x, device).astype(dtype, copy=False)

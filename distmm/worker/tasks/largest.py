"""The k largest elements of each row of a matrix, on NumPy and CuPy; equal ones by ascending column.

Sorting whole rows, or partitioning them, costs more than their product for small k. So the rows are read twice. The
first pass finds a value that at least k elements of the row reach: the k-th largest of the maxima of some hundred
groups of columns. The second one picks what reaches it, a few more than k elements, and only these are sorted.

The order is NumPy's: NaN is larger than any number, and -0.0 equals 0.0. The result follows from the elements alone,
however the matrix was cut. On a GPU a kernel does it in one read, where it can (`reductions_on_gpu`).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from distmm.worker import gpu
from distmm.worker.tasks import reductions_on_gpu
from distmm.worker.tasks.rows import Block

# Groups of columns for each of the k. With fewer, more elements reach the k-th largest of their maxima: with 16, it is
# half an element of a row too many for k = 15.
GROUPS = 16

# Columns of a group from which on the maxima pay: below, each row is partitioned.
LEAST_GROUP = 4


def sortable(x: Block) -> Block:
    """Return elements in a type that the libraries sort and compare fast: same values, same order."""
    if x.dtype == np.bool_:
        return x.view(np.uint8)
    return x.astype(np.float32) if x.dtype in (np.float16, ml_dtypes.bfloat16) else x


def largest(x: Block, k: int) -> tuple[Block, Block]:
    """Return the k largest elements of each row, and their columns.

    Parameters
    ----------
    x : array ``(r, n)`` of real numbers, as `sortable` returns them
    k : int
        At most n.

    Returns
    -------
    values, columns : arrays ``(r, k)``, of the type of `x` and int64
        In descending order.
    """
    if (found := reductions_on_gpu.largest(x, k)) is not None:
        return found
    library = gpu.namespace(x)
    rows, n = x.shape
    if 2 * k >= n:
        columns = _descending(library, x)[:, :k]
        return library.take_along_axis(x, columns, axis=1), columns
    candidates = _reach(library, x, _reached(library, x, k))
    places = library.flatnonzero(candidates)
    row, column = places // n, places % n
    values = x.ravel()[places]
    order = _descending(library, values[None])[0]
    # Rows ascending, and within a row in this order. Fewer than 2**16 rows are sorted by their digits.
    row = row[order]
    order = order[library.argsort(row.astype(np.uint16) if rows < 1 << 16 else row, kind="stable")]
    counts = library.bincount(row, minlength=rows)
    first = library.cumsum(counts) - counts
    chosen = order[(first[:, None] + library.arange(k)).ravel()]
    return values[chosen].reshape(rows, k), column[chosen].reshape(rows, k).astype(np.int64, copy=False)


def topk_of_chunk(x: Block, k: int, axis: tuple[int, ...], keepdims: bool) -> Block:
    """Do what `dask.array.chunk.topk` does. CuPy sorts a whole block for it; the kernel reads the block once."""
    if axis == (x.ndim - 1,) and (found := reductions_on_gpu.largest(x, k)) is not None:
        return found[0].astype(x.dtype, copy=False)
    from dask.array import chunk

    return chunk.topk(x, k, axis, keepdims)


def _reached(library: Any, x: Block, k: int) -> Block:
    """Return a value for each row ``(r, 1)`` that k elements of it reach, at least."""
    rows, n = x.shape
    size = n // (GROUPS * k)
    if size >= LEAST_GROUP:
        count = n // size
        x = x[:, : size * count].reshape(rows, size, count).max(axis=1)  # of columns j, j + count, ...: along the rows
        n = count
    return library.partition(x, n - k, axis=1)[:, n - k, None]


def _reach(library: Any, x: Block, value: Block) -> Block:
    """Return which elements are at least as large as the `value` of their row, where NaN is larger than all."""
    below = x < value  # never true of a NaN
    candidates = library.logical_not(below, out=below)
    if x.dtype.kind == "f":
        unordered = library.isnan(value[:, 0])
        if unordered.any():  # k elements are NaN: nothing else is as large
            candidates = library.where(unordered[:, None], library.isnan(x), candidates)
    return candidates


def _descending(library: Any, x: Block) -> Block:
    """Return the columns of each row by descending element; equal elements by ascending column."""
    last = x.shape[1] - 1
    return (last - library.argsort(x[:, ::-1], axis=1, kind="stable"))[:, ::-1]

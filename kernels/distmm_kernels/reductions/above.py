"""The elements of a matrix in GPU memory that are greater than or equal to a number."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch import driver
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.reductions.lines import LANES, LONGEST, compared, pieces, span, vector

MAKER = "distmm_kernels.device_code.above:above"
WARPS = 4  # of a block
HELD_BYTES = 32  # that a lane holds of a row, and compares at a time
EXACT = 1 << 53  # float64 cannot represent all integers beyond it


def suits(dtype: np.dtype[Any], columns: int, least: float) -> bool:
    """Whether `above` supports elements of this type, rows of this many columns, and this number."""
    wide = compared(dtype)
    return wide is not None and columns <= LONGEST and (wide.kind == "f" or abs(least) < EXACT)


def above(x: Array, least: float, most: int, device: Device) -> tuple[int, Array, Array, Array]:
    """Return the number of elements ``>= least``, and their rows, columns and values, in row-major order.

    Runs on CuPy's current stream, and waits for it. NaN is not ``>= least``.

    Parameters
    ----------
    x : cupy.ndarray ``(m, n)``
        A matrix that `suits` accepts, with any strides.
    least : float
        Rounded to float32 if the elements are compared in float32.
    most : int
        The most elements to return. If there are more, only their number is returned, to save memory.
    device : Device
        The device that has `x`.

    Returns
    -------
    count : int
    rows, columns, values : cupy.ndarray ``(count,)``, or None
        Types: int64, int64 and the type of `x`.
    """
    if x.strides[1] != x.itemsize and x.strides[0] == x.itemsize:
        count, columns, rows, values = above(x.T, least, most, device)
        if rows is None:
            return count, None, None, None
        order = rows.argsort(kind="stable")
        return count, rows[order], columns[order], values[order]
    array, dtype = type(x), compared(x.dtype)
    assert dtype is not None
    if dtype.kind == "i":
        limit = max(math.ceil(least), np.iinfo(dtype).min)
        if limit > np.iinfo(dtype).max:
            limit, x = 0, x[:0]
    else:
        (limit,) = struct.unpack("q", struct.pack("d", dtype.type(least)))

    def run(picks: bool, starts: Array, *found: Array) -> None:
        recipe = Recipe(MAKER, (dtype.name, picks, HELD_BYTES // dtype.itemsize, LANES, WARPS))
        kernel, results = driver.loaded(recipe, device), [each for to in found for each in vector(to, to.size)]
        for (at,), rows in pieces(x, dtype, device):
            height, n = rows.shape
            arguments = *span(rows), *vector(starts[at], height), *results, limit
            values = *arguments, rows.strides[0] // dtype.itemsize, height, n, at.start
            kernel.launch((-(-height // WARPS), 1, 1), values)

    ends, nowhere = array((len(x) + 1,), np.int64), array((0,), np.int64)
    ends[:1] = 0
    run(False, ends[1:], nowhere, nowhere, array((0,), dtype))
    ends = ends.cumsum()
    count = int(ends[-1])
    if count > most:
        return count, None, None, None
    found = array((count,), np.int64), array((count,), np.int64), array((count,), dtype)
    if count:
        run(True, ends, *found)
    rows, columns, values = found
    return count, rows, columns, values.astype(x.dtype, copy=False)

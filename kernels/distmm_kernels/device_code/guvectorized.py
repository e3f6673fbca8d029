"""A row of C from one row of A and the whole of B, as a generalised ufunc of Numba: ``(k),(k,n),(n)->(n)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from distmm_kernels.device_code.arithmetic import multiply_add
from distmm_kernels.device_code.emit import from_dtype, guvectorize, types


def row_times_b(dtype: np.dtype[Any]) -> tuple[Callable[..., None], Any]:
    """Make the function ``(a, b, c, d)`` of a row of A, all of B, and rows of C and D; return it and its signature."""
    fma = multiply_add(dtype)
    vector, matrix = (types.Array(from_dtype(dtype), dimensions, "A") for dimensions in (1, 2))

    def multiply_row(a, b, c, d):
        for j in range(b.shape[1]):
            acc = c[j]
            k = 0
            while k < b.shape[0]:  # as in naive: a third of the instructions of `for k in range(...)`
                acc = fma(acc, a[k], b[k, j])
                k += 1
            d[j] = acc

    return multiply_row, types.void(vector, matrix, vector, vector)


@functools.cache
def compiled(dtype: np.dtype[Any], compute_capability: tuple[int, int]) -> Callable[..., Any]:
    """Compile the ufunc for one type, once for each process and architecture."""
    del compute_capability  # a key of the cache; Numba compiles for the current device
    function, signature = row_times_b(dtype)
    return guvectorize([signature], "(k),(k,n),(n)->(n)", target="cuda")(function)

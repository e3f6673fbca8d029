"""Matrices times two vectors, and the squared norms of their rows: one pass over a matrix in GPU memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch import driver
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.layout.stack import VECTOR_BYTES, Stack
from distmm_kernels.layout.vectors import in_vectors

MAKER = "distmm_kernels.device_code.thin_products:times_vectors"
ROWS, WARPS, LANES = 4, 4, 32  # rows of a warp, warps of a block, and lanes
TYPES = ("float16", "bfloat16", "float32", "float64")


def reads(dtype: np.dtype[Any]) -> bool:
    """Whether the kernel multiplies matrices of this type."""
    return dtype.name in TYPES


def times_vectors(matrices: Array, vectors: Array, device: Device) -> tuple[Array, Array]:
    """Return the products and the squared norms of rows. Runs on CuPy's current stream.

    Parameters
    ----------
    matrices : cupy.ndarray ``(m, n)`` or ``(matrices, m, n)``
        Of a type that `reads` accepts, with any strides. Copied, if their rows are not aligned vectors.
    vectors : cupy.ndarray ``(n, 2)`` or ``(matrices, n, 2)``
        Of float64 for float64 matrices, else of float32. Copied, unless each matrix is contiguous and on 16 bytes.
    device : Device
        The device that has them.

    Returns
    -------
    products : cupy.ndarray ``(m, 2)`` or ``(matrices, m, 2)``
        Of the type of the vectors.
    squares : cupy.ndarray ``(m,)`` or ``(matrices, m)``
        Of float64.
    """
    rows = matrices if Stack.of(matrices).has_vectors(-1) else in_vectors(matrices, device)
    at = Stack.of(rows)
    *batch, m, n = rows.shape
    array = type(matrices)
    x_step = vectors.strides[0] if vectors.ndim == 3 else 0
    if vectors.strides[-2:] != (2 * vectors.itemsize, vectors.itemsize) or x_step % VECTOR_BYTES:
        given, vectors = vectors, array((*vectors.shape[:-2], n + n % 2, 2), vectors.dtype)[..., :n, :]
        vectors[...] = given
        x_step = vectors.strides[0] if vectors.ndim == 3 else 0
    products = array((*batch, m + m % 2, 2), vectors.dtype)[..., :m, :]
    squares = array((*batch, m), np.float64)
    y_step = products.strides[0] if batch else 0
    places = vectors.data.ptr, x_step, products.data.ptr, y_step, squares.data.ptr
    kernel = _kernel(rows.dtype, device)
    kernel.launch((-(-m // (ROWS * WARPS)), 1, at.matrices), (), (at.address, at.step, at.pitch, m, n, *places))
    return products, squares


@functools.cache
def _kernel(dtype: np.dtype[Any], device: Device) -> driver.LoadedKernel:
    return driver.loaded(Recipe(MAKER, (dtype.name,)), device)

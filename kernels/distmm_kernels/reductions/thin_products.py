"""Matrices times two vectors, and the squared norms of their rows: one pass over a matrix in GPU memory.

Complex matrices are read once for each vector. A complex vector is two real ones, whose products with the real numbers
of a row are the real and the imaginary part of one number (`distmm_kernels.layout.real_view`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch import driver
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.launches import MAX_GRID_Y
from distmm_kernels.layout.real_view import REALS, as_real, doubled
from distmm_kernels.layout.stack import VECTOR_BYTES, Stack, address
from distmm_kernels.layout.vectors import has_vectors, in_vectors

MAKER = "distmm_kernels.device_code.thin_products:times_vectors"
ROWS, WARPS, LANES = 4, 4, 32  # rows of a warp, warps of a block, and lanes
TYPES = ("float16", "bfloat16", "float32", "float64", *REALS)


def reads(dtype: np.dtype[Any]) -> bool:
    """Whether the kernel multiplies matrices of this type."""
    return dtype.name in TYPES


def of_vectors(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of the vectors by which matrices of a type are multiplied."""
    return dtype if dtype.kind == "c" or dtype == np.float64 else np.dtype(np.float32)


def times_vectors(matrices: Array, vectors: Array, device: Device) -> tuple[Array, Array]:
    """Return the products and the squared norms of rows. Runs on CuPy's current stream.

    Parameters
    ----------
    matrices : cupy.ndarray ``(m, n)`` or ``(matrices, m, n)``
        Of a type that `reads` accepts, with any strides. Copied, if their rows are not aligned vectors.
    vectors : cupy.ndarray ``(n, 2)`` or ``(matrices, n, 2)``
        Of float64 for float64 matrices, of their own type for complex ones, else of float32. Copied, unless each matrix
        is contiguous and on 16 bytes. All matrices are multiplied by a single one.
    device : Device
        The device that has them.

    Returns
    -------
    products : cupy.ndarray ``(m, 2)`` or ``(matrices, m, 2)``
        Of the type of the vectors.
    squares : cupy.ndarray ``(m,)`` or ``(matrices, m)``
        Of float64.
    """
    if matrices.dtype.kind == "c":
        return _of_complex(matrices, vectors, device)
    at = Stack.of(matrices)
    if not at.has_vectors(-1):
        matrices = in_vectors(matrices, device)
        at = Stack.of(matrices)
    *batch, m, n = matrices.shape
    if vectors.strides[-2:] != (2 * vectors.itemsize, vectors.itemsize) or Stack.of(vectors).step % VECTOR_BYTES:
        given, (vectors, _) = vectors, _results(vectors.shape[:-2], vectors.shape[-2], vectors)
        vectors[...] = given
    products, squares = _results(tuple(batch), m, vectors)
    x, made = Stack.of(vectors), Stack.of(products)
    for first in range(0, at.matrices, MAX_GRID_Y) if products.size else ():
        kernel = driver.loaded(Recipe(MAKER, (matrices.dtype.name,)), device)
        grid = -(-m // (ROWS * WARPS)), 1, min(MAX_GRID_Y, at.matrices - first)
        read = at.address + first * at.step, at.step, at.pitch, m, n, x.address + first * x.step, x.step
        written = made.address + first * made.step, made.step, address(squares) + 8 * first * m
        kernel.launch(grid, (*read, *written))
    return products, squares


def _of_complex(matrices: Array, vectors: Array, device: Device) -> tuple[Array, Array]:
    if not has_vectors(matrices, -1):
        matrices = in_vectors(matrices, device)  # one copy for both vectors
    lines = as_real(matrices)
    products = type(matrices)((*matrices.shape[:-1], 2), vectors.dtype)
    for each in range(2):
        found, squares = times_vectors(lines, doubled(vectors[..., each : each + 1], device), device)
        products.real[..., each], products.imag[..., each] = found[..., 0], found[..., 1]
    return products, squares


def _results(batch: tuple[int, ...], m: int, vectors: Array) -> tuple[Array, Array]:
    """Return new arrays for the products and the squared norms, in one allocation.

    Products of each matrix begin at multiples of 16 bytes, so that they can be the vectors of a further product.
    """
    import cupy

    lines, itemsize = m + m % 2 if batch else m, vectors.itemsize
    step, matrices = 2 * itemsize * lines, math.prod(batch)
    memory = cupy.cuda.alloc(matrices * (step + 8 * m) + 8)
    strides = (*(step for _ in batch), 2 * itemsize, itemsize)
    products = cupy.ndarray((*batch, m, 2), vectors.dtype, memory, strides)
    return products, cupy.ndarray((*batch, m), np.float64, memory + matrices * step)

"""Matrices times two vectors on the host: the launches are NumPy's, at the addresses that they are given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from distmm_kernels.launch.launches import MAX_GRID_Y
from distmm_kernels.layout import stack
from distmm_kernels.reductions import thin_products
from tests.kernels.selection import H200


def at(address, shape, strides, dtype):
    """The array at an address."""
    size = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    return as_strided(np.frombuffer((ctypes.c_char * size).from_address(address), dtype, 1), shape, strides)


def test_a_batch_of_more_matrices_than_a_grid_has_is_multiplied_in_several_launches(monkeypatch):
    grids = []

    def launch(grid, values):
        grids.append(grid)
        (matrix, step, pitch, m, n), (vectors, of_x, products, of_p, squares) = values[:5], values[5:]
        left = at(matrix, (grid[2], m, n), (step, pitch, 4), "f4")
        at(products, (grid[2], m, 2), (of_p, 8, 4), "f4")[...] = left @ at(vectors, (grid[2], n, 2), (of_x, 8, 4), "f4")
        at(squares, (grid[2], m), (8 * m, 8), "f8")[...] = (left.astype("f8") ** 2).sum(-1)

    def results(batch, m, vectors):
        return np.full((*batch, m, 2), 7, vectors.dtype), np.full((*batch, m), 7.0)

    monkeypatch.setattr(thin_products.driver, "loaded", lambda recipe, device: SimpleNamespace(launch=launch))
    monkeypatch.setattr(thin_products, "_results", results)
    for module in (thin_products, stack):
        monkeypatch.setattr(module, "address", lambda array: array.ctypes.data)
    rng, count = np.random.default_rng(1), MAX_GRID_Y + 3
    for single in (False, True):  # one pair of vectors for all matrices
        matrices = rng.integers(-9, 9, (count, 3, 4)).astype("f4")
        x = rng.integers(-9, 9, (4, 2) if single else (count, 4, 2)).astype("f4")
        products, squares = thin_products.times_vectors(matrices, x, H200)
        np.testing.assert_array_equal(products, matrices @ x)
        np.testing.assert_array_equal(squares, (matrices**2).sum(-1))
    assert max(grid[2] for grid in grids) <= MAX_GRID_Y

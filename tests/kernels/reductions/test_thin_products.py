"""Matrices times two vectors on the host: the launches are NumPy's, at the addresses that they are given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from distmm_kernels.arrays import verify
from distmm_kernels.launch.launches import MAX_GRID_Y
from distmm_kernels.layout import stack
from distmm_kernels.layout.vectors import row_pitch
from distmm_kernels.reductions import thin_products
from tests.kernels.reference.exact import doubled_twin
from tests.kernels.reference.matrices import STRIDES, strided
from tests.kernels.selection import H200


def at(address, shape, strides, dtype):
    """The array at an address."""
    if 0 in shape:
        return np.empty(shape, dtype)
    size = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    return as_strided(np.frombuffer((ctypes.c_char * size).from_address(address), dtype, 1), shape, strides)


@pytest.fixture
def copies(monkeypatch):
    """Shapes of the matrices that were copied to rows of aligned vectors."""
    seen = []

    def copied(rows, device):
        seen.append(rows.shape)
        *others, length = rows.shape
        whole = np.zeros((*others, row_pitch(length, rows.itemsize)), rows.dtype)
        whole[..., :length] = rows
        return whole[..., :length]

    monkeypatch.setattr(thin_products, "in_vectors", copied)
    return seen


@pytest.fixture
def grids(monkeypatch, copies):
    """The grids of the launches of float32 and float64, which NumPy computes."""
    seen = []

    def loaded(recipe, device):
        (dtype,), size = recipe.parameters, np.dtype(*recipe.parameters).itemsize

        def launch(grid, values):
            seen.append(grid)
            (matrix, step, pitch, m, n), (vectors, of_x, products, of_p, squares) = values[:5], values[5:]
            assert not (matrix | pitch) % 16
            left = at(matrix, (grid[2], m, n), (step, pitch, size), dtype)
            x = at(vectors, (grid[2], n, 2), (of_x, 2 * size, size), dtype)
            at(products, (grid[2], m, 2), (of_p, 2 * size, size), dtype)[...] = left @ x
            at(squares, (grid[2], m), (8 * m, 8), "f8")[...] = (left.astype("f8") ** 2).sum(-1)

        return SimpleNamespace(launch=launch)

    def results(batch, m, vectors):
        return np.full((*batch, m, 2), 7, vectors.dtype), np.full((*batch, m), 7.0)

    monkeypatch.setattr(thin_products.driver, "loaded", loaded)
    monkeypatch.setattr(thin_products, "_results", results)
    monkeypatch.setattr(thin_products, "doubled", lambda block, device: doubled_twin(block))
    for module in (thin_products, stack):
        monkeypatch.setattr(module, "address", lambda array: array.ctypes.data)
    return seen


def test_a_batch_of_more_matrices_than_a_grid_has_is_multiplied_in_several_launches(grids):
    rng, count = np.random.default_rng(1), MAX_GRID_Y + 3
    for single in (False, True):  # one pair of vectors for all matrices
        matrices = rng.integers(-9, 9, (count, 3, 4)).astype("f4")
        x = rng.integers(-9, 9, (4, 2) if single else (count, 4, 2)).astype("f4")
        products, squares = thin_products.times_vectors(matrices, x, H200)
        np.testing.assert_array_equal(products, matrices @ x)
        np.testing.assert_array_equal(squares, (matrices**2).sum(-1))
    assert max(grid[2] for grid in grids) <= MAX_GRID_Y


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("order", [order for order in STRIDES if order != "reversed"])  # `at` has no negative strides
def test_complex_matrices_of_any_layout_are_multiplied_by_complex_vectors(grids, copies, dtype, order):
    rng = np.random.default_rng(1)

    def drawn(*shape):
        return (rng.integers(-9, 9, shape) + 1j * rng.integers(-9, 9, shape)).astype(dtype)

    for batch, m, n in (((), 6, 33), ((3,), 5, 8), ((), 1, 7), ((2,), 4, 1), ((), 1, 1), ((2,), 0, 5), ((), 3, 0)):
        matrices = strided(drawn(*batch, m, n), order)
        for x in (drawn(n, 2), drawn(*batch, n, 2)):
            copies.clear()
            products, squares = thin_products.times_vectors(matrices, x, H200)
            assert products.dtype == dtype
            np.testing.assert_array_equal(products, matrices @ x)
            np.testing.assert_array_equal(squares, (abs(matrices.astype("c16")) ** 2).sum(-1).round())
            assert len(copies) <= 1  # for both vectors
    assert grids


class OnGpu(np.ndarray):
    """An array of NumPy that says where it is, as CuPy's do."""

    data = SimpleNamespace(device_id=0)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_batches_broadcast_and_may_have_no_rows_no_columns_and_no_matrices(grids, monkeypatch, dtype):
    monkeypatch.setattr(verify, "device_of", lambda index: H200)
    check = object.__new__(verify.Check)
    check._fused = True
    for batch, of_x in (((2, 1), (3,)), ((3,), ()), ((0,), (1,)), ((), (2,))):
        for m, n in ((4, 5), (4, 0), (0, 5), (0, 0)):
            matrices, x = np.ones((*batch, m, n), dtype).view(OnGpu), np.ones((*of_x, n, 2), dtype)
            products, squares = check._times(matrices, x)
            np.testing.assert_array_equal(products, np.asarray(matrices) @ x)
            assert squares.shape == products.shape[:-1]
            assert (squares == n).all()

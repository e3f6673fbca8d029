"""Products of every kernel on the simulator: shapes, batches, strides, what is not finite."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numba import config

from distmm_kernels.gemm.tiled import TiledKernel
from distmm_kernels.launch import launches as launch
from tests.kernels.device_code.simulator.simulated_gpu import multiply
from tests.kernels.device_code.simulator.small_kernels import TILE, SmallNaive, SmallRegisterTiled, SmallTiled
from tests.kernels.reference import products as reference
from tests.kernels.reference.matrices import STRIDES, error_bound, matrix
from tests.kernels.reference.products import first_difference

SHAPES = [
    (1, 1, 1),
    (TILE - 1, TILE, TILE + 1),
    (TILE, TILE, TILE),
    (TILE + 1, 2 * TILE + 1, TILE - 1),
    (1, 3 * TILE - 1, 2),
    (2 * TILE + 1, 1, 1),
]
REALS = "float32", "float64", "int32", "int64"
every = pytest.mark.parametrize("kernel", [SmallNaive, SmallTiled, SmallRegisterTiled])


def test_this_is_the_simulator():
    assert config.ENABLE_CUDASIM


# all of these are within one tile of the register-tiled kernel, which has shapes of its own below: one is one element,
# one has vectors in rows of C of 16 bytes, one has none
@pytest.mark.parametrize(
    ("kernel", "dtype", "shape"),
    [*itertools.product((SmallNaive, SmallTiled), (*REALS, "complex64", "complex128"), SHAPES),
     *itertools.product((SmallRegisterTiled,), REALS, (SHAPES[0], SHAPES[1], SHAPES[3]))],
)  # fmt: skip
def test_every_ragged_shape_is_right(kernel, shape, dtype):
    m, k, n = shape
    a, b, c = (matrix(s, dtype, seed, "integers") for seed, s in enumerate(((m, k), (k, n), (m, n))))
    d = multiply(kernel, a, b, c)
    assert d.dtype == dtype
    assert first_difference(d, (a @ b + c).astype(dtype)) is None
    assert first_difference(multiply(kernel, a, b), a @ b) is None


@every
def test_an_error_of_rounding_is_all_that_real_numbers_show(kernel):
    a, b = matrix((TILE + 1, 3 * TILE + 1), "float32", 0), matrix((3 * TILE + 1, TILE), "float32", 1)
    d = multiply(kernel, a, b)
    assert first_difference(d, reference.multiply(a, b), atol=error_bound(a, b, "float32")) is None


@pytest.mark.parametrize("cut", [TILE, 2 * TILE])
def test_the_bits_of_tiled_do_not_depend_on_how_k_is_cut(cut):
    k = 3 * TILE + 1
    a, b = matrix((TILE + 1, k), "float32", 0), matrix((k, TILE + 1), "float32", 1)
    chain = None
    for first in range(0, k, cut):
        chain = multiply(SmallTiled, a[:, first : first + cut], b[first : first + cut], chain)
    np.testing.assert_array_equal(chain, multiply(SmallTiled, a, b))


def test_naive_and_tiled_give_the_same_bits():
    a, b, c = (matrix((2 * TILE + 1, 2 * TILE + 1), "float32", seed) for seed in range(3))
    np.testing.assert_array_equal(multiply(SmallNaive, a, b, c), multiply(SmallTiled, a, b, c))


@every
def test_batches_broadcast(kernel):
    a, b = matrix((2, 1, 3, 5), "int64", 0, "integers"), matrix((3, 5, 2), "int64", 1, "integers")
    np.testing.assert_array_equal(multiply(kernel, a, b), a @ b)


def test_a_batch_beyond_the_grids_limit_is_cut_into_launches(monkeypatch):
    monkeypatch.setattr(launch, "MAX_GRID_Y", 2)
    a, b = matrix((5, 2, 3), "int64", 0, "integers"), matrix((3, 2), "int64", 1, "integers")
    d = np.zeros((5, 2, 2), "int64")
    assert [stack[3].shape[0] for stack in launch.matrices(a, b, d, d)] == [2, 2, 1]
    np.testing.assert_array_equal(multiply(SmallNaive, a, b), a @ b)


def test_the_real_tile_on_one_ragged_block():
    a, b = matrix((3, 33), "float32", 0, "integers"), matrix((33, 2), "float32", 1, "integers")
    np.testing.assert_array_equal(multiply(TiledKernel, a, b), a @ b)


@every
@pytest.mark.parametrize("order", STRIDES)
def test_every_stride_is_read_in_place(kernel, order):
    shapes = (TILE + 1, TILE + 3), (TILE + 3, TILE - 1), (TILE + 1, TILE - 1)
    a, b, c = (matrix(s, "int64", seed, "integers", order) for seed, s in enumerate(shapes))
    np.testing.assert_array_equal(multiply(kernel, a, b, c), a @ b + c)


# threads outside C may multiply the zero frame by infinity; what they get is not written
@pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")
@every
def test_nan_and_infinity_stay_in_their_rows_and_columns(kernel):
    a, b = np.ones((TILE + 1, TILE + 1)), np.ones((TILE + 1, TILE + 1))
    a[0, 0], b[TILE, 1] = np.nan, np.inf
    expected = np.full_like(a, TILE + 1)
    expected[:, 1] = np.inf
    expected[0] = np.nan
    np.testing.assert_array_equal(multiply(kernel, a, b), expected)

"""The register-tiled kernels on the simulator, around the edges of their tiles; by multiply-adds and by `mma.sync`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.device_code.simulator.simulated_gpu import multiply
from tests.kernels.device_code.simulator.small_kernels import (
    SmallDeepDmma,
    SmallDmma,
    SmallRegisterTiled,
    SmallTallDmma,
)
from tests.kernels.reference.matrices import matrix


# (m, k, n) around the tile of 8 x 16 and its 8 steps, of which 3 stages are under way
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize("shape", [(8, 8, 16), (7, 9, 17), (9, 16, 18), (8, 33, 16)])
def test_register_tiles_are_right_in_every_order(orders, shape):
    m, k, n = shape
    a, b = matrix((m, k), "int64", 0, "integers", orders[0]), matrix((k, n), "int64", 1, "integers", orders[1])
    c = matrix((m, n), "int64", 2, "integers")
    np.testing.assert_array_equal(multiply(SmallRegisterTiled, a, b, c), a @ b + c)


# (m, k, n) around the tile of 32 x 16 and its 8 steps
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        (SmallDmma, (31, 9, 17)),
        (SmallDmma, (1, 1, 1)),
        (SmallTallDmma, (32, 8, 16)),
        (SmallTallDmma, (2, 33, 6)),
        (SmallDeepDmma, (31, 17, 15)),
    ],
)
def test_tiles_of_a_warps_instructions_are_right_in_every_order(kernel, orders, shape):
    m, k, n = shape
    a = amid_nan(matrix((m, k), "float64", 0, "integers"), orders[0])
    b = amid_nan(matrix((k, n), "float64", 1, "integers"), orders[1])
    c = matrix((m, n), "float64", 2, "integers")
    np.testing.assert_array_equal(multiply(kernel, a, b, c), a @ b + c)


def amid_nan(values, order):
    """The same matrix in memory where each of its lines begins at a multiple of 16 bytes and ends before NaN."""
    lines = values if order == "C" else values.T
    rows, pitch = len(lines), lines.shape[1] + 2 + lines.shape[1] % 2
    memory = np.full(rows * pitch + 1, np.nan)
    first = memory.ctypes.data // 8 % 2
    placed = memory[first:][: rows * pitch].reshape(rows, pitch)[:, : lines.shape[1]]
    placed[...] = lines
    return placed if order == "C" else placed.T


def test_register_tiles_are_numbered_in_groups_that_cover_c_once():
    rows, columns = SmallRegisterTiled.tiling.rows, SmallRegisterTiled.tiling.columns
    a, b = matrix((17 * rows + 1, 1), "int64", 0, "integers"), matrix((1, columns + 1), "int64", 1, "integers")
    np.testing.assert_array_equal(multiply(SmallRegisterTiled, a, b), a @ b)


@pytest.mark.parametrize("cut", [8, 5])
def test_the_bits_of_register_tiles_do_not_depend_on_how_k_is_cut(cut):
    a, b = matrix((9, 19), "float64", 0), matrix((19, 5), "float64", 1)
    chain = None
    for first in range(0, 19, cut):
        chain = multiply(SmallRegisterTiled, a[:, first : first + cut], b[first : first + cut], chain)
    np.testing.assert_array_equal(chain, multiply(SmallRegisterTiled, a, b))

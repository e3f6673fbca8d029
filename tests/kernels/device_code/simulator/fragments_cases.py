"""The kernel of `ldmatrix` and `mma.sync` on the simulator: numbers of 8, 16 and 32 bits, around the edges of tiles."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from numba import cuda
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

from distmm_kernels.device_code.fragments import source
from distmm_kernels.emulation.moduli import OFFSET, epilogue_multiplier
from distmm_kernels.tiles.fragment_tiles import ITEMSIZE, FragmentTiling

# two or four warps of 16 x 16 or more, 64 or 128 bytes of k in a stage
SMALL = {
    "bfloat16": FragmentTiling(32, 32, 32, 3, 4, 4, 8, 1),
    "float16": FragmentTiling(32, 64, 64, 2, 2, 8, 8, 1),
    "int8": FragmentTiling(32, 32, 64, 3, 2, 4, 16, 1),
    "tfloat32": FragmentTiling(64, 32, 16, 4, 4, 8, 4, 1),
}
LAYOUTS = list(itertools.product((True, False), repeat=2))


def amid_poison(values, along_rows):
    """The matrix in memory where each line begins at a multiple of 16 bytes, ends before poison, or in zeros there."""
    lines = values if along_rows else values.T
    vector = 16 // values.itemsize
    pitch = (lines.shape[1] // vector + 2) * vector
    memory = np.full(len(lines) * pitch + vector, 199, values.dtype)
    first = -memory.ctypes.data // values.itemsize % vector
    placed = memory[first:][: len(lines) * pitch].reshape(len(lines), pitch)[:, : lines.shape[1]]
    placed[...] = lines
    return (placed if along_rows else placed.T)[None]


@pytest.mark.parametrize(
    ("operand", "along_k", "shape", "starts"),
    [
        *(("bfloat16", way, (33, 70, 31), True) for way in LAYOUTS),
        *(("float16", way, (34, 65, 66), False) for way in LAYOUTS),
        *(("int8", LAYOUTS[0], shape, True) for shape in ((32, 64, 32), (33, 129, 65))),
        *(("tfloat32", LAYOUTS[0], shape, True) for shape in ((1, 1, 1), (65, 17, 30))),
    ],
)
def test_products_are_right_however_operands_lie(operand, along_k, shape, starts):
    m, k, n = shape
    tiling = dataclasses.replace(SMALL[operand], along_k=along_k)
    rng, narrow = np.random.default_rng(0), f"u{ITEMSIZE[operand]}"
    sums = "int32" if operand == "int8" else "float32"
    a, b = rng.integers(0, 100, (m, k)).astype(narrow), rng.integers(0, 100, (k, n)).astype(narrow)
    c = rng.integers(0, 99, (1, m, n) if starts else (0, 0, 0)).astype(sums)
    whole = np.full((1, m + 2, n + 2), 77, sums)
    made = source(operand, tiling, 2 if n % 2 == 0 else 1)
    grid = -(-m // tiling.rows) * -(-n // tiling.columns), 1
    given = amid_poison(a, along_k[0]).swapaxes(1, 2), amid_poison(b, not along_k[1]), c, whole[:, 1:-1, 1:-1]
    cuda.jit(made.function)[grid, made.threads](*map(FakeCUDAArray, given))
    want = a.astype(int) @ b.astype(int) + (c[0] if starts else 0)
    np.testing.assert_array_equal(whole[0, 1:-1, 1:-1], want)
    whole[:, 1:-1, 1:-1] = 77
    assert (whole == 77).all(), "wrote outside C"


@pytest.mark.parametrize("shape", [(32, 64, 32), (33, 129, 65), (1, 1, 2)])
def test_of_residues_each_product_is_stored_as_a_byte_modulo_its_own_number(shape):
    (m, k, n), moduli = shape, (256, 255, 193)
    tiling, rng = SMALL["int8"], np.random.default_rng(0)
    a, b = (rng.integers(0, 100, (3, *size), "uint8") for size in ((m, k), (k, n)))
    table = np.array([[(modulus, epilogue_multiplier(modulus))] for modulus in moduli], np.uint32).view(np.int32)
    whole = np.full((3, m + 2, n + 2), 77, "uint8")
    d = whole[:, 1:-1, 1:-1]
    made = source("int8", tiling, 2 if n % 2 == 0 else 1, True)
    grid = -(-m // tiling.rows) * -(-n // tiling.columns), 3
    given = a.swapaxes(1, 2), b, table, d
    cuda.jit(made.function)[grid, made.threads](*map(FakeCUDAArray, given))
    want = (a.astype(int) @ b.astype(int) + OFFSET) % np.reshape(moduli, (3, 1, 1)) - OFFSET
    np.testing.assert_array_equal(d.view("int8"), want)
    whole[:, 1:-1, 1:-1] = 77
    assert (whole == 77).all(), "wrote outside C"


@pytest.mark.parametrize(("operand", "along_k"), [*(("float16", way) for way in LAYOUTS), ("tfloat32", LAYOUTS[0])])
def test_of_halves_all_products_but_that_of_the_low_ones_are_added_and_scaled_before_c(operand, along_k):
    m, k, n = 33, 70, 38
    tiling = dataclasses.replace(SMALL[operand], along_k=along_k, halves=True)
    rng, narrow = np.random.default_rng(0), f"u{ITEMSIZE[operand]}"
    (high_a, low_a), (high_b, low_b) = (rng.integers(0, 99, (2, *shape)).astype(narrow) for shape in ((m, k), (k, n)))
    c = rng.integers(0, 99, (1, m, n)).astype("float32")
    rows, columns = (2.0 ** rng.integers(0, 2, shape) for shape in ((1, m, 1), (1, 1, n)))
    factors = [np.broadcast_to(x.astype("float32"), c.shape) for x in (rows, columns)]
    if operand == "tfloat32":
        factors, rows, columns = [np.zeros((0, 0, 0), "float32")] * 2, 1, 1
    d = np.full(c.shape, 77, "float32")
    left = (amid_poison(x, along_k[0]).swapaxes(1, 2) for x in (high_a, low_a))
    right = (amid_poison(x, not along_k[1]) for x in (high_b, low_b))
    made = source(operand, tiling, 2)
    grid = -(-m // tiling.rows) * -(-n // tiling.columns), 1
    cuda.jit(made.function)[grid, made.threads](*map(FakeCUDAArray, (*left, *right, c, d, *factors)))
    high_a, low_a, high_b, low_b = (x.astype(int) for x in (high_a, low_a, high_b, low_b))
    product = high_a @ high_b + low_a @ high_b + high_a @ low_b
    np.testing.assert_array_equal(d, c + product * rows * columns)

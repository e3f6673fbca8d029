"""Deep products of few tiles on the host: the launches are NumPy's, at the addresses that they are given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from distmm_kernels.config import Problem
from distmm_kernels.gemm import aligned
from distmm_kernels.gemm.hopper import HopperKernel
from distmm_kernels.launch import hopper_launch
from distmm_kernels.launch.hopper_launch import NO_FINISH, NO_SCALES
from distmm_kernels.layout import stack
from distmm_kernels.tiles import slices
from distmm_kernels.tiles.hopper_tiles import STRETCH
from tests.kernels.on_numpy import NOWHERE


def at(address, shape, strides, dtype):
    """The array at an address."""
    size = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    return as_strided(np.frombuffer((ctypes.c_char * size).from_address(address), dtype, 1), shape, strides)


@pytest.fixture
def launched(monkeypatch):
    """Kernels of each launch, in order."""
    kernels = []

    def gemm(tile, device):
        def run(a, b, c, d, scales=NO_SCALES, finish=NO_FINISH):
            assert (scales, finish) == (NO_SCALES, NO_FINISH)
            kernels.append((tile, d.matrices))
            left, right = (at(x.address, x.shape, x.strides, tile.operand) for (x,) in (a, b))
            left = left if tile.a_major == "k" else left.swapaxes(1, 2)
            right = right.swapaxes(1, 2) if tile.b_major == "k" else right
            to = at(d.address, d.shape, d.strides, tile.output)
            to[...] = 0 if c is None else at(c.address, c.shape, c.strides, tile.accumulator)
            for z in range(d.matrices):
                matrix, first = slices.place(np.uint32(z), np.uint32(left.shape[2])) if tile.sliced else (z, 0)
                steps = slice(int(first), int(first) + STRETCH) if tile.sliced else slice(None)
                x, y = (each[min(int(matrix), len(each) - 1)].astype(tile.accumulator) for each in (left, right))
                to[z] += (x[:, steps] @ y[steps]).astype(tile.output)

        return run

    def loaded(recipe, device):
        accumulator, output, adds = recipe.parameters

        def launch(grid, values):
            kernels.append((recipe, values[4]))
            sums, step, matrix_step, pitch, count, c, c_step, c_pitch, d, d_step, d_pitch, rows, columns = values
            assert grid[0] * slices.THREADS * slices.COLUMNS >= rows * columns
            shape, itemsize = (grid[2], rows, columns), np.dtype(output).itemsize
            total = at(c, shape, (c_step, c_pitch, 4), accumulator).copy() if adds else np.zeros(shape, accumulator)
            for each in at(sums, (count, *shape), (step, matrix_step, pitch, 4), accumulator):
                total += each
            at(d, shape, (d_step, d_pitch, itemsize), output)[...] = total

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(hopper_launch, "hopper_gemm", gemm)
    monkeypatch.setattr(aligned, "loaded", loaded)
    monkeypatch.setattr(HopperKernel, "_module", np)
    monkeypatch.setattr(stack, "address", lambda array: array.ctypes.data)
    return kernels


def integers(shape, dtype, seed):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("batch_a", "batch_b"), [((), ()), ((3,), (3,)), ((2,), ()), ((2, 1), (2,))])
@pytest.mark.parametrize("together", [2, 3])
def test_slices_of_every_matrix_are_added_to_c(launched, monkeypatch, dtype, adds, batch_a, batch_b, together):
    monkeypatch.setattr(slices, "at_once", lambda *sizes: together)
    m, k, n = 12, 2 * STRETCH + 48, 24
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype(dtype)), NOWHERE)
    a, b = integers((*batch_a, m, k), dtype, 1), integers((*batch_b, k, n), dtype, 2)
    if dtype == "int8":  # along k only
        b = np.ascontiguousarray(b.swapaxes(-1, -2)).swapaxes(-1, -2)
    wide_a, wide_b = a.astype(kernel.accumulator), b.astype(kernel.accumulator)
    expected = wide_a @ wide_b
    c = integers(expected.shape, kernel.accumulator, 3) if adds else None
    d = kernel._empty(expected.shape, kernel.accumulator)
    d[...] = -77
    kernel._accumulate(kernel._format(a, "A"), kernel._format(b, "B"), c, d)
    np.testing.assert_array_equal(d, expected + (0 if c is None else c))
    added = [slices_of for _, slices_of in launched[1::2]]
    assert added == {2: [2, 1], 3: [3]}[together] * (sum(added) // 3)


def test_only_the_last_run_rounds_to_a_narrower_type(launched, monkeypatch):
    monkeypatch.setattr(slices, "at_once", lambda *sizes: 2)
    k = 3 * STRETCH
    a, b = np.zeros((8, k), "f2"), np.ones((k, 8), "f2")
    a[:, :2] = 1024, 1  # 1025 and three quarters: float16 has no halves there, and rounds to even
    a[:, STRETCH], a[:, 2 * STRETCH] = 0.5, 0.25
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype("float16")), NOWHERE)
    d = kernel._empty((8, 8), np.dtype("float16"))
    kernel._accumulate(kernel._format(a, "A"), kernel._format(b, "B"), None, d)
    np.testing.assert_array_equal(d, np.float16(1025.75))
    outputs = [recipe.parameters[1:] for recipe, _ in launched[1::2]]
    assert outputs == [("float32", False), ("float16", True)]


def test_only_k_of_more_than_a_stretch_is_sliced(launched):
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype("float16")), NOWHERE)
    for k, deep in ((STRETCH, False), (STRETCH + 8, True)):
        a, b = integers((8, k), "f2", 1), integers((k, 8), "f2", 2)
        kernel._accumulate(kernel._format(a, "A"), kernel._format(b, "B"), None, kernel._empty((8, 8), np.dtype("f4")))
        tile, matrices = launched[0]
        assert (tile.sliced, matrices) == (deep, 2 if deep else 1)
        launched.clear()

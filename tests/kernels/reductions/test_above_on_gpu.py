"""The elements above a threshold, found by a kernel on a GPU: those that NumPy finds, for any elements and layout."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels import device
from distmm_kernels.reductions import lines
from distmm_kernels.reductions.above import EXACT, above, suits

pytestmark = pytest.mark.gpu

TYPES = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]


def check(x, there, least):
    count, *found = above(there, least, x.size, device.current())
    with np.errstate(invalid="ignore"):
        expected = np.nonzero(x >= least)
    assert count == len(expected[0])
    for mine, own in zip(found, (*expected, x[expected]), strict=True):
        assert mine.dtype == own.dtype
        np.testing.assert_array_equal(mine.get(), own)


@pytest.mark.parametrize("dtype", TYPES)
def test_they_are_those_that_numpy_finds(dtype):
    import cupy

    dtype = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (3, 40), (7, 4097), (300, 2000)):
        x = (50 * rng.standard_normal(shape)).astype(dtype)
        if dtype.kind != "i":
            x[rng.random(shape) < 0.1] = np.nan
            x[rng.random(shape) < 0.1] = np.inf
        there = cupy.asarray(x)
        for least in (-np.inf, -40, 0, 0.1, 100.0, np.inf):
            if suits(dtype, shape[1], least):
                check(x, there, least)
    assert suits(dtype, 5, 1.5)
    assert suits(dtype, 5, float(EXACT)) == (dtype.kind != "i")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_any_strides_will_do(dtype, monkeypatch):
    import cupy

    monkeypatch.setattr(lines, "PIECE_BYTES", 40_000)  # several pieces of rows
    x = np.random.default_rng(1).standard_normal((90, 700)).astype(dtype)
    there = cupy.asarray(x)
    for view in (np.s_[:, :], np.s_[::2], np.s_[:, ::3], np.s_[::-1, ::-1], np.s_[:, 5:605], np.s_[:1], np.s_[:, :1]):
        check(x[view], there[view], 1.5)
        check(x[view].T, there[view].T, 1.5)


def test_more_than_there_is_room_for_are_only_counted():
    import cupy

    x = cupy.arange(12.0).reshape(3, 4)
    assert above(x, 5, 6, device.current()) == (7, None, None, None)
    assert above(x, 5, 7, device.current())[0] == 7

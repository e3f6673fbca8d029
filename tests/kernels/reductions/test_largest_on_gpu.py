"""The k largest elements of rows, found by a kernel on a GPU: the same as by sorting, for any elements and layout."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels import device
from distmm_kernels.reductions.largest import MOST, largest, suits

pytestmark = pytest.mark.gpu

TYPES = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]


def by_sorting(x, k):
    """Columns of the k largest of each row: NaN first, then by descending element, then by ascending column."""
    wide = x.astype("f8") if x.dtype.kind not in "iu" else x
    backwards = wide[..., ::-1].argsort(axis=-1, kind="stable")[..., ::-1]
    return (x.shape[-1] - 1 - backwards)[..., :k]


def elements(kind, shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    n = shape[-1]
    x = {
        "normal": lambda: 100 * rng.standard_normal(shape),
        "few": lambda: rng.integers(-2, 3, shape),
        "equal": lambda: np.ones(shape),
        "ascending": lambda: np.broadcast_to(np.arange(n), shape),
        "descending": lambda: np.broadcast_to(np.arange(n)[::-1], shape),
        "special": lambda: rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], shape),
    }[kind]()
    return np.ascontiguousarray(x).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["normal", "few", "equal", "ascending", "descending", "special"])
def test_the_largest_are_those_of_a_sort(kind, dtype):
    import cupy

    dtype = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    if kind == "special" and dtype.kind == "i":
        pytest.skip("integers have no NaN")
    for shape in ((1, 1), (3, 40), (2, 5, 4096), (7, 4097), (3, 20001)):
        x = elements(kind, shape, dtype)
        there = cupy.asarray(x)
        for k in sorted({min(k, shape[-1]) for k in (1, 15, 32, 33, MOST)}):
            assert suits(dtype, k, shape[-1])
            values, columns = (each.get() for each in largest(there, k, device.current()))
            expected = by_sorting(x, k)
            np.testing.assert_array_equal(columns, expected)
            own = np.take_along_axis(x, expected, axis=-1)
            np.testing.assert_array_equal(values, own.astype(values.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_any_strides_will_do(dtype, monkeypatch):
    import cupy

    from distmm_kernels.reductions import lines as module

    monkeypatch.setattr(module, "PIECE_BYTES", 40_000)  # several pieces of rows
    x = elements("normal", (3, 60, 700), dtype)
    there = cupy.asarray(x)
    for view in (
        np.s_[:, :, :],
        np.s_[:, ::2],
        np.s_[:, :, ::3],
        np.s_[::-1, ::-1],
        np.s_[:, :, 5:605],
        np.s_[1, :1],
    ):
        for turned in (False, True):
            here, on_gpu = (each[view].swapaxes(-1, -2) if turned else each[view] for each in (x, there))
            k = min(9, here.shape[-1])
            values, columns = (each.get() for each in largest(on_gpu, k, device.current()))
            np.testing.assert_array_equal(columns, by_sorting(here, k))
            np.testing.assert_array_equal(values, np.take_along_axis(here, columns, axis=-1).astype(values.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weighing", ["plain", "times", "minus"])
def test_scores_are_compared_and_nan_is_the_least(weighing, dtype):
    import cupy

    rng = np.random.default_rng(3)
    x = elements("normal", (20, 9000), dtype)
    x[rng.random(x.shape) < 0.01] = np.nan
    weights = rng.standard_normal(9000).astype(dtype)
    scores = {"plain": x, "times": x * weights, "minus": x - weights}[weighing]
    scores = np.where(np.isnan(scores), np.array(-np.inf, dtype), scores)
    given = None if weighing == "plain" else cupy.asarray(weights)
    values, columns = (each.get() for each in largest(cupy.asarray(x), 15, device.current(), weighing, given))
    np.testing.assert_array_equal(columns, by_sorting(scores, 15))
    np.testing.assert_array_equal(values, np.take_along_axis(scores, columns, axis=-1))

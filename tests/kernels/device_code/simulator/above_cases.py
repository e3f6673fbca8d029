"""The elements above a threshold, on the simulator: warps of four lanes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from distmm_kernels.device_code.above import above

LANES, HELD, WARPS = 4, 2, 2


@settings(max_examples=40)
@given(
    rows=st.integers(1, 5),
    n=st.integers(1, 40),
    least=st.sampled_from([-np.inf, 0.0, 1.0, 2.0, 3.0, np.inf]),
    top=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_they_are_counted_and_picked_in_the_order_of_rows(rows, n, least, top, seed):
    rng = np.random.default_rng(seed)
    memory = np.full((rows, n + 3), np.inf, "f4")
    memory[:, :n] = rng.choice([np.nan, -np.inf, -1.0, 0.0, 1.0, 2.0, np.inf], (rows, n))
    x, grid = memory[:, :n], -(-rows // WARPS)
    ends, places, values = np.full(rows + 2, -7), np.empty((0,), "i8"), np.empty((0,), "f4")
    ends[0] = 0
    sizes = n + 3, rows, n, top
    count, pick = (above("float32", picks, HELD, LANES, WARPS) for picks in (False, True))
    with np.errstate(invalid="ignore"):
        cuda.jit(count.function)[grid, count.threads](memory.ravel(), ends[1:], places, places, values, least, *sizes)
        expected = np.nonzero(x >= least)
    np.testing.assert_array_equal(ends, [0, *(x >= least).sum(axis=1), -7])
    starts = ends[:-2].cumsum()
    size = len(expected[0])
    found, columns, values = np.full(size + 1, -7), np.full(size + 1, -7), np.full(size + 1, -7, "f4")
    with np.errstate(invalid="ignore"):
        cuda.jit(pick.function)[grid, pick.threads](memory.ravel(), starts, found, columns, values, least, *sizes)
    np.testing.assert_array_equal(found, [*(expected[0] + top), -7])
    np.testing.assert_array_equal(columns, [*expected[1], -7])
    np.testing.assert_array_equal(values, [*x[expected], -7])

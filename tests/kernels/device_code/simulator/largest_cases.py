"""The k largest of rows, on the simulator: blocks of eight threads with two elements each, and groups of two."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import cuda

from distmm_kernels.device_code.largest import largest

THREADS, HELD, MOST = 8, 2, 2


def order(x):
    """Columns by descending element, NaN first, then by ascending column."""
    with np.errstate(invalid="ignore"):
        return np.lexsort((np.arange(len(x)), np.where(np.isnan(x), 0, -x), ~np.isnan(x)))


@settings(max_examples=40)
@example(n=90, k=2, weighing="", kinds="ascending", seed=0)  # each stretch has a new best k
@example(n=90, k=2, weighing="", kinds="equal", seed=0)
@given(
    n=st.integers(1, 90),
    k=st.integers(1, MOST),
    weighing=st.sampled_from(["", "plain", "times", "minus"]),
    kinds=st.sampled_from(["few", "many", "ascending", "equal", "special"]),
    seed=st.integers(0, 99),
)
def test_the_largest_of_rows_are_those_of_a_sort(n, k, weighing, kinds, seed):
    k = min(k, n)
    rng = np.random.default_rng(seed)
    rows, pitch = 2, n + 3
    x = np.full((rows, pitch), np.inf, "f4")
    x[:, :n] = {
        "few": rng.integers(0, 3, (rows, n)),
        "many": rng.permutation(rows * n).reshape(rows, n),
        "ascending": np.arange(n),
        "equal": 1,
        "special": rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], (rows, n)),
    }[kinds]
    weights = rng.integers(1, 4, n).astype("f4")
    with np.errstate(invalid="ignore"):
        scores = {"times": x[:, :n] * weights, "minus": x[:, :n] - weights}.get(weighing, x[:, :n])
    if weighing:
        scores = np.where(np.isnan(scores), np.float32(-np.inf), scores)
    values, columns = np.full((rows + 1) * k, 7, "f4"), np.full((rows + 1) * k, -1, "i8")
    source = largest("float32", weighing, MOST, THREADS, HELD)
    before = x.copy()
    given_weights = weights if weighing in ("times", "minus") else weights[:0]
    with np.errstate(invalid="ignore"):
        cuda.jit(source.function)[rows, source.threads](x.ravel(), given_weights, values, columns, pitch, n, k)
    expected = np.array([order(row)[:k] for row in scores])
    np.testing.assert_array_equal(columns[: rows * k].reshape(rows, k), expected)
    np.testing.assert_array_equal(values[: rows * k].reshape(rows, k), np.take_along_axis(scores, expected, axis=1))
    assert (columns[rows * k :] == -1).all()
    np.testing.assert_array_equal(x, before)

"""The k largest of rows and of columns, on the simulator: warps of four lanes."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import cuda

from distmm_kernels.device_code.largest import of_columns, of_rows

LANES, HELD, WARPS = 4, 2, 2


def order(x):
    """Columns by descending element, NaN first, then by ascending column."""
    with np.errstate(invalid="ignore"):
        return np.lexsort((np.arange(len(x)), np.where(np.isnan(x), 0, -x), ~np.isnan(x)))


@settings(max_examples=60)
@example(n=90, k=2, columns=False, weighing="", kinds="ascending", seed=0)  # each element is a new best one
@example(n=90, k=9, columns=True, weighing="", kinds="equal", seed=0)
@given(
    n=st.integers(1, 90),
    k=st.integers(1, 3 * LANES),
    columns=st.booleans(),
    weighing=st.sampled_from(["", "plain", "times", "minus"]),
    kinds=st.sampled_from(["few", "many", "ascending", "equal", "special"]),
    seed=st.integers(0, 99),
)
def test_the_largest_of_lines_are_those_of_a_sort(n, k, columns, weighing, kinds, seed):
    k = min(k, n)
    rng = np.random.default_rng(seed)
    lines = 1 + seed % (2 * LANES)  # the last block is not full
    x = {
        "few": lambda: rng.integers(0, 3, (lines, n)),
        "many": lambda: rng.permutation(lines * n).reshape(lines, n),
        "ascending": lambda: np.broadcast_to(np.arange(n), (lines, n)),
        "equal": lambda: np.ones((lines, n)),
        "special": lambda: rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], (lines, n)),
    }[kinds]().astype("f4")
    stored = x.T if columns else x
    memory = np.full((len(stored), stored.shape[1] + 3), np.inf, "f4")
    memory[:, :-3] = stored
    weights = rng.integers(1, 4, n).astype("f4")
    with np.errstate(invalid="ignore"):
        scores = {"times": x * weights, "minus": x - weights}.get(weighing, x)
    if weighing:
        scores = np.where(np.isnan(scores), np.float32(-np.inf), scores)
    values, places = np.full((lines + 1) * k, 7, "f4"), np.full((lines + 1) * k, -1, "i8")
    registers = -(-k // LANES)
    source = (of_columns if columns else of_rows)("float32", weighing, registers, HELD, LANES, WARPS)
    grid = -(-lines // WARPS)
    before = memory.copy()
    given_weights = weights if weighing in ("times", "minus") else weights[:0]
    with np.errstate(invalid="ignore"):
        cuda.jit(source.function)[grid, source.threads](
            memory.ravel(), given_weights, values, places, memory.shape[1], lines, n, k
        )
    expected = np.array([order(line)[:k] for line in scores])
    np.testing.assert_array_equal(places[: lines * k].reshape(lines, k), expected)
    np.testing.assert_array_equal(values[: lines * k].reshape(lines, k), np.take_along_axis(scores, expected, axis=1))
    assert (places[lines * k :] == -1).all()
    np.testing.assert_array_equal(memory, before)

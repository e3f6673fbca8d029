"""What a threshold picks of a block: just the elements, or the pairs of rows, whose values reach it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm.worker.tasks import metrics
from distmm.worker.tasks.reductions import on_host
from distmm.worker.tasks.threshold import Threshold


def test_a_threshold_keeps_what_reaches_it_or_says_how_much_does() -> None:
    x = np.array([[1.0, np.nan, 3.0], [2.0, 2.0, -1.0]])
    count, *kept = Threshold(2.0, 3).chunk(x, 10, None)
    assert count == 3
    assert [each.tolist() for each in kept] == [[0, 1, 1], [12, 10, 11], [3.0, 2.0, 2.0]]
    assert Threshold(2.0, 2).chunk(x, 10, None) == (3, None, None, None)
    assert Threshold(1e39, 3).chunk(x.astype("f4"), 10, None)[0] == 0


@given(
    metric=st.sampled_from(["cosine", "euclidean"]),
    dtype=st.sampled_from(["f4", "f8"]),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e15]),
    seed=st.integers(0, 10**6),
    special=st.booleans(),
)
def test_a_threshold_of_a_metric_keeps_just_the_values_that_reach_it(
    metric: metrics.Metric, dtype: str, scale: float, seed: int, special: bool
) -> None:
    """The threshold is one of the values, or the number next to it: nothing may be lost in the rounding of scores."""
    rng = np.random.default_rng(seed)
    x, y = (scale * rng.integers(-3, 4, (size, 3)) + scale * rng.normal(0, 1e-6, (size, 3)) for size in (7, 9))
    x[0], y[:2] = 0, x[1:3]
    if special:
        x[3, 0], x[4, 1], y[5, 2] = np.nan, np.inf, -np.inf
    x, y = x.astype(dtype), y.astype(dtype)
    with np.errstate(all="ignore"):
        products = x @ y.T
        squares = [metrics.squared_norms(each)[:, 0] for each in (x, y)]
        values = metrics.value_of(metrics.weighed(products, metric, squares[1]), metric, squares[0])
    known = values[~np.isnan(values)]
    least = known[rng.integers(len(known))]
    for t in (least, np.nextafter(least, -np.inf), np.nextafter(least, np.inf), -np.inf, np.inf):
        with np.errstate(invalid="ignore"):
            rows, columns = np.nonzero(values <= t if metric == "euclidean" else values >= t)
        kept = Threshold(float(t), 63, metric=metric).chunk(products, 10, (squares[0], squares[1]))
        assert kept[0] == len(rows)
        for mine, own in zip(kept[1:], (rows, columns + 10, values[rows, columns]), strict=True):
            np.testing.assert_array_equal(mine, own)
            assert mine.dtype == own.dtype
        if len(rows):
            few = Threshold(float(t), len(rows) - 1, metric=metric).chunk(products, 10, (squares[0], squares[1]))
            assert few == (len(rows), None, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_gpus_keep_the_pairs_of_a_metric_that_cpus_do(metric: metrics.Metric, dtype: str) -> None:
    import cupy

    rng = np.random.default_rng(9)
    x, y = rng.standard_normal((300, 5)).astype(dtype), rng.standard_normal((2000, 5)).astype(dtype)
    squares = [metrics.squared_norms(each)[:, 0] for each in (x, y)]
    products, reduction = x @ y.T, Threshold(0.8, 10**6, metric=metric)
    expected = reduction.chunk(products, 7, (squares[0], squares[1]))
    found = on_host(reduction.chunk(cupy.asarray(products), 7, tuple(map(cupy.asarray, squares))))
    assert found[0] == expected[0] > 1000
    for mine, own in zip(found[1:3], expected[1:3], strict=True):
        np.testing.assert_array_equal(mine, own)
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-6)

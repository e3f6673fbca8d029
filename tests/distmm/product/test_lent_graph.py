"""NumPy arrays in the graphs of Dask arrays: which of them are lent, and which Dask arrays are one NumPy array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import pytest
from dask.highlevelgraph import HighLevelGraph
from distributed import Client

import distmm
from distmm.product.arrays_in_graphs import lent, whole

X = np.arange(600 * 500.0).reshape(600, 500)


def other_blocks() -> da.Array:
    """A Dask array whose blocks are parts of one array, and not in its order."""
    graph = {("swapped", 0, 0): X[300:], ("swapped", 1, 0): X[:300]}
    return da.Array(HighLevelGraph.from_collections("swapped", graph), "swapped", ((300, 300), (500,)), dtype=X.dtype)


@pytest.mark.parametrize("chunks", [(600, 500), (250, 500), (250, 130)])
def test_an_array_that_dask_has_made_of_a_numpy_array_is_that_array(chunks: tuple[int, int]) -> None:
    found = whole(da.from_array(X, chunks=chunks))
    assert found is not None
    np.testing.assert_array_equal(found, X)


@pytest.mark.parametrize(
    "made",
    [
        lambda D: D + 1,
        lambda D: D.T,
        lambda D: D[:300],
        lambda D: D.rechunk(100),
        lambda D: other_blocks(),
        lambda D: da.from_array(np.ma.masked_equal(X, 3), chunks=300),
        lambda D: da.zeros((600, 500), chunks=300),
        lambda D: da.from_array(np.empty((0, 5)), chunks=5),
    ],
)
def test_any_other_array_is_not(made: Callable[[da.Array], da.Array]) -> None:
    assert whole(made(da.from_array(X, chunks=300))) is None


def test_an_array_that_was_changed_is_not() -> None:
    D = da.from_array(X, chunks=300)
    D[0] = 1
    assert whole(D) is None


@pytest.mark.parametrize("made", [lambda D: D, lambda D: D + 1, lambda D: D[3:].T, lambda D: other_blocks()])
def test_blocks_are_read_where_they_are(cluster: Callable[[int], Client], made: Callable[[Any], da.Array]) -> None:
    client = cluster(2)
    array = made(da.from_array(X, chunks=(300, 500)))
    reads = lent(array, client)
    assert reads is not array
    assert reads.name == array.name
    values = [value for layer in reads.dask.layers.values() for value in dict(layer).values()]
    assert not any(isinstance(value, np.ndarray) for value in values)
    np.testing.assert_array_equal(client.compute(reads).result(), array.compute(scheduler="sync"))
    with client.as_current():
        np.testing.assert_allclose(distmm.matmul(array, array.T).compute(), distmm.matmul(array, array.T).compute())


def test_small_arrays_are_sent(cluster: Callable[[int], Client]) -> None:
    array = da.from_array(X[:10], chunks=5)
    assert lent(array, cluster(1)) is array

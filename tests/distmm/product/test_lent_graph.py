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
from distmm.product.arrays_in_graphs import array_behind, lent
from distmm.product.chains import Chains
from distmm.product.operand import wrap
from distmm.product.product import Gemm
from distmm.product.reduced_product import product_of

X = np.arange(600 * 500.0).reshape(600, 500)


def other_blocks() -> da.Array:
    """A Dask array whose blocks are parts of one array, and not in its order."""
    graph = {("swapped", 0, 0): X[300:], ("swapped", 1, 0): X[:300]}
    return da.Array(HighLevelGraph.from_collections("swapped", graph), "swapped", ((300, 300), (500,)), dtype=X.dtype)


@pytest.mark.parametrize("chunks", [(600, 500), (250, 500), (250, 130)])
def test_an_array_that_dask_has_made_of_a_numpy_array_is_that_array(chunks: tuple[int, int]) -> None:
    found = array_behind(da.from_array(X, chunks=chunks))
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
    assert array_behind(made(da.from_array(X, chunks=300))) is None


def test_an_array_that_was_changed_is_not() -> None:
    D = da.from_array(X, chunks=300)
    D[0] = 1
    assert array_behind(D) is None


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


SMALL = {"one array": lambda D: D, "its transpose": lambda D: D.T, "persisted": lambda D: D.persist()}


@pytest.mark.parametrize("second", SMALL)
@pytest.mark.parametrize("first", SMALL)
def test_many_chunks_of_a_numpy_array_are_loaded_in_the_blocks_of_the_plan(
    cluster: Callable[[int], Client], first: str, second: str
) -> None:
    a, b = (np.random.default_rng(seed).integers(-9, 9, (96, 96)).astype("f8") for seed in (1, 2))
    with cluster(2).as_current():
        A, B = SMALL[first](da.from_array(a, chunks=8)), SMALL[second](da.from_array(b, chunks=8))
        C = distmm.matmul(A, B)
        assert C.chunks == ((8,) * 12,) * 2
        loads = [layer for name, layer in C.dask.layers.items() if name.startswith("distmm-load")]
        assert len(loads) == 2 - [first, second].count("persisted")
        assert all(len(layer) < 16 for layer in loads)
        assert not {A.name, B.name} & {*C.dask.layers} - {x.name for x in (A, B) if "persisted" in (first, second)}
        assert distmm.matmul(A, B).name == C.name
        expected = (a.T if first == "its transpose" else a) @ (b.T if second == "its transpose" else b)
        np.testing.assert_array_equal(C.sum(axis=0).compute(), expected.sum(axis=0))
        np.testing.assert_array_equal(C[5:40, ::3].compute(), expected[5:40, ::3])
        np.testing.assert_array_equal(C.compute(), expected)


@pytest.mark.parametrize("made", [lambda D: D, lambda D: D.persist()], ids=["one array", "persisted"])
def test_reductions_and_checks_have_no_task_for_each_product_of_small_chunks(
    cluster: Callable[[int], Client], made: Callable[[da.Array], da.Array]
) -> None:
    x, y = (np.random.default_rng(seed).integers(-9, 9, (96, 80)).astype("f8") + 0.5 for seed in (1, 2))
    with cluster(2).as_current():
        X, Y = made(da.from_array(x, chunks=8)), made(da.from_array(y, chunks=8))
        best = distmm.nearest(X, Y, 3, "euclidean")
        chains = [layer for name, layer in best.values.dask.layers.items() if name.startswith("distmm-matmul")]
        assert sum(map(len, chains)) < 100
        distances = np.sqrt(((x[:, None] - y) ** 2).sum(axis=-1))
        values, indices = best.compute()
        np.testing.assert_allclose(values, np.sort(distances, axis=1)[:, :3])
        np.testing.assert_allclose(np.take_along_axis(distances, indices, 1), values)
        np.testing.assert_allclose(distmm.reduce(X, None, "sum", axis=0).compute(), (x @ x.T).sum(axis=0))
        assert distmm.verify(X, Y.T, made(da.from_array(x @ y.T, chunks=8))).ok


def test_reductions_recognise_the_transpose_of_what_they_read_here(cluster: Callable[[int], Client]) -> None:
    X = da.from_array(np.ones((96, 80)), chunks=8)
    again = da.from_array(np.ones((96, 80)), chunks=8)
    with cluster(1).as_current():
        for a, b in ((X, X.T), (X, again.T), (X.T, again), (X.persist(), X.T)):
            product, _ = product_of(a, b, False, False)
            assert product.symmetry == "symmetric"
            assert product.a.in_memory is not product.a.resident
        assert product_of(X, again, False, True)[0].symmetry == "symmetric"
        assert product_of(X, X.T + 1, False, False)[0].symmetry is None


def test_blocks_for_gpus_and_for_cpus_have_other_names() -> None:
    a = wrap(da.from_array(np.ones((8, 8)), chunks=4), "A")
    chains = Chains(Gemm.of(a, a), distmm.plan(a.source, a.source), "numpy", None)
    assert a.here is not None
    names = {chains._loaded(a, a.here, ((8,), (8,)), device).name for device in ("cpu", "cuda", "cpu")}  # type: ignore[arg-type]
    assert len(names) == 2


def test_small_chunks_that_are_added_are_loaded_in_the_blocks_of_the_plan(cluster: Callable[[int], Client]) -> None:
    a, b = (np.random.default_rng(seed).integers(-9, 9, (96, 96)).astype("f8") for seed in (1, 2))
    with cluster(2).as_current():
        A, B = (da.from_array(x, chunks=8) for x in (a, b))
        C = distmm.gemm(2, A, B, 3, A)
        assert not {A.name, B.name} & {*C.dask.layers}
        assert distmm.gemm(2, A, B, 3, A).name == C.name
        np.testing.assert_array_equal(C.compute(), 2 * (a @ b) + 3 * a)


def test_chunks_that_do_not_meet_are_loaded_and_not_rechunked() -> None:
    a, b = np.arange(600.0).reshape(20, 30), np.arange(360.0).reshape(30, 12)
    A, B = da.from_array(a, chunks=(6, 7)), da.from_array(b, chunks=(11, 5))
    C = distmm.matmul(A, B)
    assert C.chunks == ((6, 6, 6, 2), (5, 5, 2))
    assert not [name for name in C.dask.layers if "rechunk" in name]
    np.testing.assert_array_equal(C.compute(), a @ b)


def test_small_arrays_are_sent(cluster: Callable[[int], Client]) -> None:
    array = da.from_array(X[:10], chunks=5)
    assert lent(array, cluster(1)) is array

"""`cov` and `corrcoef`: NumPy's results, from blocks that are read twice and need not stay in memory."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import distmm
from distmm.errors import InputError
from distmm.graph.dask_tasks import ProductTask

pytestmark = pytest.mark.usefixtures("synchronous")


def observed(shape: tuple[int, ...], dtype: str = "f8", seed: int = 0) -> np.ndarray:
    """Observations around a mean that is far from zero."""
    rng = np.random.default_rng(seed)
    x = 10 * rng.standard_normal(shape) + 100
    return (x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


@settings(max_examples=25)
@given(st.data())
def test_covariances_are_numpys(data: st.DataObject) -> None:
    variables, n = data.draw(st.integers(1, 5)), data.draw(st.integers(3, 9))
    rowvar, dtype = data.draw(st.booleans()), data.draw(st.sampled_from(["f8", "f4", "i4", "c16"]))
    shape = (n,) if variables == 1 else (variables, n)
    m = observed(shape, dtype)
    others = data.draw(st.sampled_from([None, (n,), (1, n), (3, n)]))
    y = None if others is None else observed(others, "f8", 1)
    if not rowvar:
        m, y = m.T, y.T if y is not None and y.ndim == 2 and y.shape[0] > 1 else y
    how: dict[str, Any] = {
        "rowvar": rowvar,
        "bias": data.draw(st.booleans()),
        "ddof": data.draw(st.sampled_from([None, 0, 1])),
    }
    if data.draw(st.booleans()):
        how["fweights"] = data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    if data.draw(st.booleans()):
        how["aweights"] = np.linspace(1, 2, n)
    chunks = data.draw(st.integers(1, 4))
    M, Y = (da.from_array(x, chunks=chunks) if x is not None and data.draw(st.booleans()) else x for x in (m, y))
    found, expected = distmm.cov(M, Y, **how), np.cov(m, y, **how)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(found.compute(), expected, rtol=1e-9, atol=1e-8)
    found, expected = distmm.corrcoef(M, Y, rowvar), np.corrcoef(m, y, rowvar)
    assert (found.shape, found.dtype) == (np.shape(expected), expected.dtype)
    np.testing.assert_allclose(found.compute(), expected, rtol=1e-9, atol=1e-9)


def test_the_result_is_symmetric_and_correlations_stay_within_one() -> None:
    x = observed((5, 3))
    x = np.concatenate([x, 3 * x, -x])
    for X in (x, da.from_array(x, chunks=(4, 2))):
        for found in (distmm.cov(X).compute(), distmm.corrcoef(X).compute()):
            np.testing.assert_array_equal(found, found.T)
        assert np.abs(found).max() <= 1
    z = distmm.corrcoef(observed((5, 9), "c16")).compute()
    np.testing.assert_array_equal(z, z.conj().T)


def test_a_small_spread_around_a_large_mean_is_not_lost() -> None:
    x = observed((4, 200)) + 1e9
    for X in (x, da.from_array(x, chunks=(2, 50))):
        np.testing.assert_allclose(distmm.cov(X).compute(), np.cov(x), rtol=1e-6)
        np.testing.assert_allclose(distmm.corrcoef(X).compute(), np.corrcoef(x), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8"])
def test_the_type_of_the_result_can_be_chosen(dtype: str) -> None:
    x = observed((4, 20), "f4")
    flags = x > 100
    np.testing.assert_allclose(distmm.cov(flags).compute(), np.cov(flags), atol=1e-12)
    for X in (x, da.from_array(x, chunks=7)):
        found = distmm.cov(X, dtype=dtype)
        assert found.dtype == found.compute().dtype == dtype
        np.testing.assert_allclose(found.compute(), np.cov(x, dtype=dtype), rtol=1e-4)
        assert distmm.corrcoef(X, dtype=dtype).compute().dtype == dtype


def test_variables_that_do_not_vary_have_no_correlation() -> None:
    x = np.array([[1.0, 2, 4], [3, 3, 3]])
    with pytest.warns(RuntimeWarning, match="invalid value"):
        found = distmm.corrcoef(x).compute()
    np.testing.assert_array_equal(np.isnan(found), [[False, True], [True, True]])


def test_one_observation_is_told() -> None:
    with pytest.warns(RuntimeWarning, match="Degrees of freedom <= 0"):
        found = distmm.cov(np.array([[1.0], [2.0]]))
    with warnings.catch_warnings(action="ignore"):
        assert np.isnan(found.compute()).all()
    assert distmm.cov(np.ones((0, 4))).shape == (0, 0)


# How observations are read


class Reads:
    """An array-like that counts how often each region is read."""

    shape, dtype, ndim = (6, 8), np.dtype("f8"), 2

    def __init__(self) -> None:
        self.values, self.regions, self.lock = observed(self.shape), Counter[Any](), threading.Lock()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        if any(s.start == s.stop for s in index):  # Dask looks at the type
            return self.values[index]
        with self.lock:
            self.regions[tuple((s.start, s.stop) for s in index)] += 1
        return self.values[index]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("function", ["cov", "corrcoef"])
def test_blocks_are_read_once_for_the_means_and_once_for_the_product(function: str, inline: bool) -> None:
    source = Reads()
    X = da.from_array(source, chunks=(3, 4), inline_array=inline) * 2
    found = getattr(distmm, function)(X)
    np.testing.assert_allclose(found.compute(), getattr(np, function)(source.values * 2))
    assert set(source.regions.values()) == {2}
    assert len(source.regions) == 4
    # A block is read for the product, centred, in one task, which waits for the mean: not before it is needed.
    (optimized,) = dask.optimize(found)
    graph = dict(optimized.__dask_graph__())
    operands = {key for task in graph.values() if isinstance(task, ProductTask) for key in task.operands()}
    assert len(operands) == 4
    for key in operands:
        waits_for = [other for other in graph[key].dependencies if isinstance(other, tuple)]
        assert waits_for
        assert all(graph[other].dependencies for other in waits_for)


def test_files_are_read_block_by_block(tmp_path: Any) -> None:
    x = observed((8, 30))
    file = zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(4, 10))
    for X in (file, da.from_zarr(file)):
        np.testing.assert_allclose(distmm.cov(X).compute(), np.cov(x))
        np.testing.assert_allclose(distmm.cov(X, rowvar=False, ddof=0).compute(), np.cov(x, rowvar=False, ddof=0))


def test_what_is_made_from_several_blocks_is_made_once() -> None:
    made = Counter[str]()

    def count(block: np.ndarray) -> np.ndarray:
        made["blocks"] += 1
        return block

    x = observed((6, 8))
    X = da.from_array(x, chunks=(3, 4)).map_blocks(count, dtype=x.dtype, meta=np.empty((0, 0))).rechunk((2, 8))
    np.testing.assert_allclose(distmm.cov(X).compute(), np.cov(x))
    assert made["blocks"] == 4
    a = observed((6, 6), seed=1)
    product = distmm.matmul(da.from_array(a, chunks=3), X)
    np.testing.assert_allclose(distmm.cov(product).compute(), np.cov(a @ x))


def test_a_cluster_reads_files_and_keeps_what_is_persisted(client: Client, tmp_path: Any) -> None:
    x = observed((40, 60))
    np.save(tmp_path / "x.npy", x)
    mapped = da.from_array(np.load(tmp_path / "x.npy", mmap_mode="r"), chunks=(20, 30))
    kept = client.persist(mapped)
    with client.as_current():
        for X in (x, mapped, kept):
            np.testing.assert_allclose(distmm.cov(X).compute(), np.cov(x), rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(distmm.corrcoef(X).compute(), np.corrcoef(x), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_correlations_are_nan_where_numpys_are() -> None:
    x = observed((4, 30))
    one = x.copy()
    one[1] *= 1e200
    for each in (x * 1e200, one, x[:, :0], x[:, :1], x[0] * 1e200, (x + 1j) * 1e200):
        expected = np.corrcoef(each)
        for lazy in (each, da.from_array(each, chunks=3)):
            found = distmm.corrcoef(lazy).compute()
            np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
            np.testing.assert_allclose(found.real, expected.real, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunks", [(0, 0, 0, 0, 4), (1, 1, 0, 1, 1)])
def test_correlations_do_not_become_nan_by_chunks_that_are_empty(chunks: tuple[int, ...]) -> None:
    x = observed((3, 4))
    lazy = da.from_array(x, chunks=((1, 0, 2), chunks))
    np.testing.assert_allclose(distmm.corrcoef(lazy).compute(), np.corrcoef(x), rtol=1e-9)


# Refusals


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"m": np.ones((2, 3, 4))}, r"m has shape \(2, 3, 4\): give one or two dimensions"),
        ({"y": np.ones((2, 3, 4))}, r"y has shape \(2, 3, 4\)"),
        ({"y": np.ones((2, 4))}, "m has 3 observations, and y has 4"),
        ({"ddof": 0.5}, "ddof is 0.5: give a whole number"),
        ({"ddof": float("nan")}, "ddof is nan: give a whole number"),
        ({"ddof": [1]}, "ddof is .1.: give a whole number"),
        ({"rowvar": "rows"}, "rowvar is 'rows'"),
        ({"dtype": "i4"}, "dtype is int32: give a floating-point or complex type"),
        ({"m": np.ones((2, 3), "c16"), "dtype": "f8"}, "dtype is float64, and the observations are complex128"),
        ({"fweights": [1, 2.5, 1]}, "fweights has values that are not whole numbers"),
        ({"fweights": [1, 2]}, r"fweights has shape \(2,\), and there are 3 observations"),
        ({"aweights": [1, -2, 1]}, "aweights has negative weights"),
        ({"aweights": [0, 0, 0]}, "the sum of the weights is 0"),
        ({"m": np.array([["a", "b", "c"]])}, "m: matrices of dtype"),
    ],
)
def test_what_numpy_refuses_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        distmm.cov(**{"m": np.ones((2, 3)), **more})


@pytest.mark.gpu
def test_gpus_estimate_covariances() -> None:
    import cupy

    x, weights = observed((50, 400)), np.linspace(1, 2, 400)
    for X in (cupy.asarray(x), da.from_array(cupy.asarray(x), chunks=(25, 100), asarray=False)):
        found = distmm.cov(X, aweights=weights).compute()
        assert isinstance(found, cupy.ndarray)
        np.testing.assert_allclose(found.get(), np.cov(x, aweights=weights), rtol=1e-9, atol=1e-8)
        np.testing.assert_allclose(distmm.corrcoef(X).compute().get(), np.corrcoef(x), rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "?", "f2", "c8"])
def test_gpus_estimate_correlations_of_narrow_types(dtype: str) -> None:
    import cupy

    x = np.random.default_rng(0).integers(0, 10, (3, 100)).astype(dtype)
    for X in (cupy.asarray(x), da.from_array(cupy.asarray(x), chunks=(2, 30), asarray=False)):
        for function, expected in ((distmm.cov, np.cov(x)), (distmm.corrcoef, np.corrcoef(x))):
            np.testing.assert_allclose(function(X).compute().get(), expected, rtol=1e-5, atol=1e-6)

"""Dask arrays that `from_array` and `from_zarr` made of arrays in files: blocks of the plan are read, not chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import h5py
import numpy as np
import pytest
import xarray
import zarr
from distributed import Client

import distmm
from distmm.product.arrays_in_graphs import array_behind
from distmm.product.operand import Operand

X = np.random.default_rng(0).integers(-9, 9, (96, 96)).astype("f8")
META = np.empty((0, 0))


def zarr_array(folder: Path, x: np.ndarray = X, name: str = "x") -> Any:
    made = zarr.create_array(str(folder / f"{name}.zarr"), shape=x.shape, chunks=(8, 8), dtype=x.dtype)
    made[:] = x
    return zarr.open_array(str(folder / f"{name}.zarr"), mode="r")


def hdf5_array(folder: Path, x: np.ndarray = X, name: str = "x") -> Any:
    with h5py.File(folder / f"{name}.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(8, 8))
    return h5py.File(folder / f"{name}.h5", "r")["x"]


def memory_map(folder: Path, x: np.ndarray = X, name: str = "x") -> Any:
    np.save(folder / f"{name}.npy", x)
    return np.load(folder / f"{name}.npy", mmap_mode="r")


def in_dataset(folder: Path, x: np.ndarray = X, name: str = "x") -> Any:
    """What xarray gives Dask: it reads, and decodes, when it becomes a NumPy array."""
    path = str(folder / f"{name}-dataset.zarr")
    xarray.Dataset({"x": (("row", "column"), x)}).to_zarr(path, zarr_format=2)
    D = xarray.open_zarr(path)["x"].data
    return D.dask.layers[f"original-{D.name}"].mapping[f"original-{D.name}"]


OPENED = {"Zarr": zarr_array, "HDF5": hdf5_array, "memory map": memory_map, "xarray": in_dataset}


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("opened", OPENED.values(), ids=OPENED)
def test_the_array_in_the_graph_is_found(tmp_path: Path, opened: Callable[..., Any], inline: bool) -> None:
    source = opened(tmp_path)
    D = da.from_array(source, chunks=(16, 8), inline_array=inline, meta=META)
    found = array_behind(D)
    assert type(found) is (np.ndarray if isinstance(source, np.memmap) else type(source))
    np.testing.assert_array_equal(np.asarray(found[:, :]), X)
    turned = Operand.of(D.T, "A")
    united = turned.read_in(((24, 72), (48, 48)))
    assert united is not None
    assert united.transposed
    assert united.shape == X.T.shape
    same = turned.read_in(turned.chunks or ())  # Dask would send all of a memory map to each task that reads a chunk
    assert (same is None) is not isinstance(source, np.memmap)
    in_parts = turned.read_in(((24, 72), (40, 56)))  # parts of chunks of D
    assert (in_parts is None) is not isinstance(source, np.memmap)


def test_the_array_that_from_zarr_has_opened_is_found(tmp_path: Path) -> None:
    zarr_array(tmp_path)
    found = array_behind(da.from_zarr(str(tmp_path / "x.zarr")))
    assert isinstance(found, zarr.Array)


@pytest.mark.parametrize(
    "made",
    [
        lambda source: da.from_array(source, chunks=16, meta=META) + 1,
        lambda source: da.from_array(source, chunks=16, meta=META)[8:],
        lambda source: da.from_array(source, chunks=16, meta=META).rechunk(24),
        lambda source: da.from_array(source, chunks=16, lock=True, meta=META),
        lambda source: da.from_array(source, chunks=16, getitem=lambda x, at: 2 * np.asarray(x[at]), meta=META),
        lambda source: da.from_array(source, chunks=16, meta=META).persist(scheduler="sync"),
    ],
    ids=["computed", "sliced", "rechunked", "locked", "with a function", "persisted"],
)
@pytest.mark.parametrize("opened", OPENED.values(), ids=OPENED)
def test_no_array_is_found_behind_others(
    tmp_path: Path, opened: Callable[..., Any], made: Callable[[Any], da.Array]
) -> None:
    D = made(opened(tmp_path))
    assert array_behind(D) is None
    expected = D.compute(scheduler="sync")
    np.testing.assert_array_equal(distmm.matmul(D, D.T).compute(scheduler="sync"), expected @ expected.T)


def test_dask_reads_what_other_processes_cannot_open(tmp_path: Path) -> None:
    hdf5_array(tmp_path).file.close()
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        D = da.from_array(file["x"], chunks=8)
        assert Operand.of(D, "A").read_in(((96,), (96,))) is None
        np.testing.assert_array_equal(distmm.matmul(D, D).compute(), X @ X)
    assert Operand.of(D, "A").read_in(((96,), (96,))) is None  # the file is closed


@pytest.mark.parametrize("opened", OPENED.values(), ids=OPENED)
def test_blocks_of_the_plan_are_read_from_the_file(
    tmp_path: Path, cluster: Callable[[int], Client], opened: Callable[..., Any]
) -> None:
    y = np.random.default_rng(1).integers(-9, 9, X.shape).astype("f8")
    with cluster(2).as_current():
        A, B = (da.from_array(opened(tmp_path, x, name), chunks=8, meta=META) for x, name in ((X, "x"), (y, "y")))
        C = distmm.matmul(A, B)
        assert C.chunks == A.chunks
        loads = [layer for name, layer in C.dask.layers.items() if name.startswith("distmm-load")]
        assert len(loads) == 2
        assert all(len(layer) < 16 for layer in loads)
        assert distmm.matmul(A, B).name == C.name
        np.testing.assert_array_equal(C.compute(), X @ y)
        np.testing.assert_array_equal(distmm.gram(A.T).sum(axis=0).compute(), (X.T @ X).sum(axis=0))
        np.testing.assert_array_equal(distmm.gemm(2, A.T, B, 3, A).compute(), 2 * (X.T @ y) + 3 * X)
        np.testing.assert_array_equal(distmm.einsum("ij,kj->ki", A, B).compute(), (X @ y.T).T)
        np.testing.assert_array_equal(distmm.reduce(A, B, "max", axis=1).compute(), (X @ y).max(axis=1))
        assert distmm.verify(A, B, C).ok
        wrong = da.from_array(opened(tmp_path, X @ y + (np.arange(96) == 50), "z"), chunks=8, meta=META)
        assert "first bad block C[0, 6]" in distmm.verify(A, B, wrong).message

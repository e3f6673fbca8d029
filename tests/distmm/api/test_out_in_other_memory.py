"""Products of GPU arrays are written to any `out`: in this process's memory, in files, on the GPU or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import distmm
from distmm import clusters

pytestmark = pytest.mark.gpu

N = 600


@pytest.fixture(scope="module")
def gpus() -> Iterator[Client]:
    pytest.importorskip("dask_cuda")
    with dask.config.set({"distmm.gpu-pool": "8GB"}), clusters.local(device="gpu", dashboard=None) as client:
        yield client


def whole(*shape: int, seed: int = 0) -> np.ndarray:
    """Small whole numbers, whose products float32 holds exactly."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype("f4")


def operand(array: np.ndarray, kind: str) -> Any:
    """Return an array of this process, or a Dask array, with its elements on the GPU."""
    import cupy

    device = cupy.asarray(array)
    if kind == "CuPy":
        return device
    return da.from_array(array, chunks=250).map_blocks(cupy.asarray, meta=device[(slice(0),) * array.ndim])


def empty(where: str, shape: tuple[int, ...], folder: Path) -> Any:
    """Return an array that receives a product."""
    import cupy
    import h5py
    import zarr

    if where == "NumPy":
        return np.empty(shape, "f4")
    if where == "NumPy with gaps":
        return np.empty(tuple(2 * n for n in shape), "f4")[tuple(slice(None, None, 2) for _ in shape)]
    if where == "CuPy":
        return cupy.empty(shape, "f4")
    if where == "Zarr":
        return zarr.create_array(folder / "c.zarr", shape=shape, chunks=(200,) * len(shape), dtype="f4")
    if where == "Zarr in memory":
        return zarr.create_array(zarr.storage.MemoryStore(), shape=shape, chunks=(200,) * len(shape), dtype="f4")
    return h5py.File(folder / "c.h5", "w").create_dataset("C", shape, "f4")


@pytest.mark.parametrize("where", ["NumPy", "NumPy with gaps", "CuPy", "Zarr", "Zarr in memory", "HDF5"])
@pytest.mark.parametrize("kind", ["CuPy", "Dask"])
@pytest.mark.parametrize("verb", ["matmul", "small blocks", "vector", "two vectors", "einsum", "sum"])
@pytest.mark.parametrize("on", ["cluster", "threads"])
def test_products_on_gpus_are_written_to_any_out(
    gpus: Client, tmp_path: Path, where: str, kind: str, verb: str, on: str
) -> None:
    a = whole(N, N) if verb != "two vectors" else whole(N)
    b = whole(N, N, seed=1) if "vector" not in verb else whole(N, seed=1)
    A, B = operand(a, kind), operand(b, kind)
    right = np.einsum("ij->i", a) if verb == "sum" else a @ b
    if verb == "two vectors" and where in ("Zarr", "Zarr in memory", "NumPy with gaps", "HDF5"):
        pytest.skip("a scalar has no chunks")
    out = empty(where, right.shape, tmp_path)
    with gpus.as_current() if on == "cluster" else dask.config.set(scheduler="threads"):
        if verb == "einsum":
            filled = distmm.einsum("ij,jk->ik", A, B, out=out)
        elif verb == "sum":
            filled = distmm.einsum("ij->i", A, out=out)
        else:
            filled = distmm.matmul(A, B, out=out, **({"blocks": (128, 128, 128)} if verb == "small blocks" else {}))
    assert filled is out
    got = out[...]
    np.testing.assert_array_equal(got.get() if hasattr(got, "get") else got, right)


def test_products_of_numpy_arrays_are_written_to_cupy_arrays(gpus: Client) -> None:
    import cupy

    a, b = whole(N, N), whole(N, N, seed=1)
    out = cupy.empty((N, N), "f4")
    with gpus.as_current():
        assert distmm.matmul(a, b, out=out) is out
    np.testing.assert_array_equal(out.get(), a @ b)

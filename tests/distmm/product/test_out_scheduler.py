"""`out` gets the product under every scheduler that Dask may use, or is refused: it never stays as it was."""

from __future__ import annotations

import os
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import fsspec
import numpy as np
import pytest
import xarray as xr
import zarr
from dask.typing import SchedulerGetCallable
from distributed import Client, futures_of
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.dirfs import DirFileSystem

import distmm
from distmm.errors import DoesNotFitError, InputError
from distmm.product import sinks
from tests.tables import later

EDGE = 400  # of float64 matrices: more bytes than `lending.SMALLEST`


def matrix(edge: int = EDGE) -> np.ndarray:
    return np.random.default_rng(edge).integers(-9, 9, (edge, edge)).astype("f8")


class InMemory:
    """An array with chunks in a process's memory. It is small when it is pickled, until a block is written."""

    dtype = np.dtype("f8")

    def __init__(self, edge: int, chunk: int) -> None:
        self.shape, self.chunks = (edge, edge), (chunk, chunk)
        self.blocks: dict[tuple[int, int], np.ndarray] = {}

    def __setitem__(self, index: tuple[slice, slice], block: np.ndarray) -> None:
        self.blocks[index[0].start, index[1].start] = block.copy()

    def elements(self) -> np.ndarray:
        out = np.full(self.shape, np.nan)
        for (row, column), block in self.blocks.items():
            out[row : row + block.shape[0], column : column + block.shape[1]] = block
        return out


def product_in_a_task(edge: int) -> bool:
    """Whether `out=`, `compute` and `threshold` are right in a task that has no client."""
    a, out = matrix(edge), np.full((edge, edge), np.nan)
    distmm.matmul(a, a, out=out)
    lazy, found = distmm.matmul(a, a).compute(), distmm.threshold(a, a, 1e9)
    return np.array_equal(out, a @ a) and np.array_equal(lazy, a @ a) and len(found.values) == 0


@pytest.mark.minutes
def test_tasks_that_occupy_all_threads_get_their_products(client: Client) -> None:
    assert all(client.gather(client.map(product_in_a_task, [EDGE, 20, EDGE, EDGE], pure=False)))


def test_the_configured_client_computes(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    a, out = matrix(), np.zeros((EDGE, EDGE))
    for scheduler in (client, client.get):
        with dask.config.set(scheduler=scheduler):
            assert distmm.plan(a, a).cluster.workers == 4
            distmm.matmul(a, a, out=out)
            np.testing.assert_array_equal(out, a @ a)
            out[:] = 0
    with client.as_current(), dask.config.set(scheduler="synchronous"):
        assert distmm.plan(a, a).cluster.workers == 1
        distmm.matmul(a, a, out=out)
    np.testing.assert_array_equal(out, a @ a)


def test_pools_of_processes_are_refused_and_threads_fill(tmp_path: Path) -> None:
    a, out = matrix(20), np.zeros((20, 20))
    threads: tuple[dict[str, Executor | SchedulerGetCallable], ...]
    with ProcessPoolExecutor(1, get_context("forkserver")) as processes, ThreadPoolExecutor(1) as thread:
        refused = ({"scheduler": processes}, {"pool": processes}, {"scheduler": "processes", "pool": thread})
        threads = {"scheduler": thread}, {"pool": thread}, {"scheduler": dask.get}
        for config in refused:
            with dask.config.set(config), pytest.raises(InputError, match="cannot write into this ndarray"):
                distmm.matmul(a, a, out=out)
            assert not out.any()
        for config in threads:
            with dask.config.set(config):
                distmm.matmul(a, a, out=out)
            np.testing.assert_array_equal(out, a @ a)
            out[:] = 0
        with dask.config.set(scheduler=processes), pytest.raises(InputError, match="keeps its elements in memory"):
            distmm.matmul(a, a, out=InMemory(20, 10))
        stored = zarr.create_array(tmp_path / "c", shape=(20, 20), chunks=(7, 9), dtype="f8")
        with dask.config.set(scheduler=processes):
            distmm.matmul(a, a, out=stored)
        np.testing.assert_array_equal(stored[:], a @ a)


def test_a_second_attempt_to_write_has_keys_of_its_own(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[set[str]] = []
    monkeypatch.setattr(
        sinks, "store", lambda waves, *_: attempts.extend({part.name for part, _ in waves()} for _ in range(2))
    )
    a = matrix(60)
    for blocks in (25, 30, 20), None:
        distmm.matmul(a, a, out=InMemory(60, 20), client=client, blocks=blocks)
    assert len(set.union(*attempts)) == len(attempts) == 4


@pytest.mark.parametrize(
    "where",
    later(["chunked object", "filled object", "memory://", "dir::memory", "subclass", "relative", "unseen"], first=3),
)
def test_what_other_processes_cannot_write_to_is_filled(
    client: Client, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(zarr.Array):  # type: ignore[type-arg]
        pass

    a, like = matrix(60), {"shape": (60, 60), "chunks": (20, 20), "dtype": "f8"}
    monkeypatch.chdir(tmp_path)
    out: Any = InMemory(60, 20)
    if where == "filled object":
        out.empty = np.zeros(1 << 16)  # more than is sent with each task
    if where == "memory://":
        out = zarr.create_array(f"memory://{tmp_path.name}", **like)
    elif where == "dir::memory":
        files = AsyncFileSystemWrapper(DirFileSystem("/dir", fsspec.filesystem("memory")), asynchronous=True)
        out = zarr.create_array(zarr.storage.FsspecStore(files, path=tmp_path.name), **like)
    elif where == "subclass":
        out = Mine(zarr.create_array(zarr.storage.MemoryStore(), **like).async_array)
    elif where == "relative":  # the workers have another working folder
        out = zarr.create_array("c.zarr", **like)
    elif where == "unseen":  # a path that means something in this process only
        zarr.create_array("c.zarr", **like)
        out = zarr.open_array(f"/proc/self/fd/{os.open('c.zarr', os.O_RDONLY)}", mode="r+")
    distmm.matmul(a, a, out=out, client=client, blocks=(25, 30, 20))
    np.testing.assert_array_equal(out.elements() if isinstance(out, InMemory) else out[:], a @ a)


@pytest.mark.parametrize("clustered", [True, False])
def test_the_array_in_an_xarray_object_is_filled(client: Client, clustered: bool) -> None:
    a, use = matrix(), client if clustered else None
    for out in (xr.DataArray(np.zeros(a.shape)), xr.Variable(("x", "y"), np.zeros(a.shape))):
        assert distmm.matmul(a, a, out=out, client=use) is out
        np.testing.assert_array_equal(out.values, a @ a)
    out = xr.DataArray(da.zeros(a.shape, chunks=100))
    assert distmm.einsum("ij,jk", a, a, out=out, client=use) is out
    assert out.chunks == ((100,) * 4,) * 2
    np.testing.assert_array_equal(out.data.compute(scheduler=client if clustered else "synchronous"), a @ a)


def test_an_out_that_distmm_cannot_fill_is_refused_by_name(tmp_path: Path) -> None:
    class Foreign:
        shape, dtype = (4, 4), "torch.float32"

        def __setitem__(self, index: Any, block: Any) -> None:
            raise AssertionError("written")

    xr.Dataset({"c": (("x", "y"), np.zeros((4, 4)))}).to_zarr(tmp_path / "c", consolidated=False)
    lazy = xr.open_zarr(tmp_path / "c", chunks=None, consolidated=False)["c"]
    for out, reason in (
        (Foreign(), r"out is a Foreign .* elements of torch.float32, a type that NumPy does not know"),
        (lazy, r"out is a DataArray of xarray that is not in memory: load it first"),
    ):
        with pytest.raises(InputError, match=reason):
            distmm.matmul(np.eye(4), np.eye(4), out=out)
        with pytest.raises(InputError, match=reason):
            distmm.einsum("ij,jk", np.eye(4), np.eye(4), out=out)


class Full:
    """An array that this process writes, and whose disk is full."""

    shape, dtype = (60, 60), np.dtype("f8")

    def __setitem__(self, index: Any, block: Any) -> None:
        raise OSError("the disk is full")


@pytest.mark.parametrize("fails", ["matmul", "einsum", "threshold"])
def test_a_call_that_fails_leaves_the_same_results_of_others(client: Client, fails: str) -> None:
    a = matrix(60)
    A = da.from_array(a, chunks=20, name=f"users-{fails}")  # equal names make equal keys
    with Client(client.scheduler.address, set_as_default=False) as other:
        kept = [one.persist(distmm.matmul(A, A, client=one)) for one in (client, other)]
        calls = {
            "matmul": partial(distmm.matmul, A, A, out=Full()),
            "einsum": partial(distmm.einsum, "ij,kj->ik", A, A.T, out=Full()),
            "threshold": partial(distmm.threshold, A, A, -1e9, most=5),
        }
        with pytest.raises((OSError, DoesNotFitError), match=r"the disk is full|the threshold keeps"):
            calls[fails](client=client)
        for one, c in zip((client, other), kept, strict=True):
            assert {future.status for future in futures_of(c)} <= {"pending", "finished"}
            np.testing.assert_array_equal(one.compute(c, sync=True), a @ a)

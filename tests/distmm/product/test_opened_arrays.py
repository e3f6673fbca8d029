"""Arrays of Zarr and HDF5 that a program has opened are read from the place where they are, or are refused."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import dask.array as da
import h5py
import numpy as np
import pytest
import zarr
from distributed import Client
from zarr.storage import FsspecStore, LocalStore, LoggingStore, MemoryStore, ZipStore

import distmm
from distmm.errors import InputError
from distmm.storage import opened
from distmm.storage.opened import by_path
from distmm.storage.zarr_folder import ZarrMatrix

A = np.arange(1.0, 49).reshape(8, 6)
B = np.arange(1.0, 31).reshape(6, 5)
STACK = np.stack([A, -A])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of this process, and not of the workers."""
    monkeypatch.chdir(tmp_path)
    zarr.create_array("a.zarr", data=A, chunks=(4, 3))
    zarr.create_array("plain.zarr", data=A, chunks=(4, 3), compressors=None)
    group = zarr.open_group("g.zarr", mode="w")
    for name, values in {"a": A, "stack": STACK, "vector": A[0]}.items():
        group.create_array(name, data=values, chunks=(*(1 for _ in values.shape[:-2]), *(4, 3)[-values.ndim :]))
    with h5py.File("a.h5", "w") as file:
        file["a"], file["vector"] = A, A[0]
        file.create_dataset("stack", data=STACK, chunks=(1, 4, 3), compression="gzip")
    with ZipStore("a.zip", mode="w") as store:
        zarr.create_array(store, data=A, chunks=(4, 3))
    return tmp_path


def zipped() -> Any:
    return zarr.open_array(ZipStore("a.zip", mode="r"), mode="r")


def logged() -> Any:
    return zarr.open_array(LoggingStore(LocalStore("a.zarr"), log_level="ERROR"))


OPENED: dict[str, Callable[[], Any]] = {
    "array": lambda: zarr.open_array("a.zarr"),
    "plain chunks": lambda: zarr.open_array("plain.zarr", mode="r"),
    "member": lambda: zarr.open_group("g.zarr", mode="r")["a"],
    "stack": lambda: zarr.open_group("g.zarr")["stack"],
    "vector": lambda: zarr.open_group("g.zarr")["vector"],
    "logged": logged,
    "url": lambda: zarr.open_array(FsspecStore.from_url(f"file://{os.path.abspath('a.zarr')}")),
    "zip": zipped,
    "memory": lambda: zarr.create_array(MemoryStore(), data=A, chunks=(4, 3)),
    "dataset": lambda: h5py.File("a.h5")["a"],
    "stack of hdf5": lambda: h5py.File("a.h5")["stack"],
    "vector of hdf5": lambda: h5py.File("a.h5")["vector"],
}


@pytest.mark.parametrize("how", OPENED)
def test_a_relative_path_is_that_of_the_call(how: str, here: Path, client: Client) -> None:
    opened = OPENED[how]()
    expected = opened[...] @ B
    lazy = distmm.matmul(opened, B, client=client)
    os.chdir("/")
    np.testing.assert_array_equal(lazy.compute(), expected)


def test_checks_and_jobs_read_the_place_of_the_call_too(here: Path, client: Client) -> None:
    a, b = zarr.open_array("a.zarr", mode="r"), h5py.File("a.h5")["a"]
    with client.as_current():
        assert distmm.verify(a, B, A @ B).outcome == "right"
        assert distmm.verify(b, B, A @ B).outcome == "right"
        np.testing.assert_allclose(distmm.cov(a, client=client).compute(), np.cov(A))
        np.testing.assert_array_equal(distmm.einsum("ij,kj->ik", a, b, client=client).compute(), A @ A.T)
        os.rename("a.h5", "a.nc")
        c = h5py.File("a.nc")["a"]
        done = distmm.multiply(a, c, "c.zarr", transb=True, client=client)
    np.testing.assert_array_equal(zarr.open_array(done.path)[...], A @ A.T)


FILES = {
    "array": ("a.zarr", "c/1/1"),
    "plain chunks": ("plain.zarr", "c/1/1"),
    "member": ("g.zarr", "a/c/1/1"),
    "stack": ("g.zarr", "stack/c/1/1/1"),
    "zip": ("a.zip", ""),
    "dataset": ("a.h5", ""),
}


@pytest.mark.parametrize("how", FILES)
@pytest.mark.parametrize("loss", ["renamed", "replaced", "chunk"])
def test_what_is_lost_after_the_call_is_an_error_and_no_zeros(how: str, loss: str, here: Path, client: Client) -> None:
    opened = OPENED[how]()
    lazy = distmm.matmul(opened, B, client=client)
    file, chunk = FILES[how]
    if loss == "chunk" and chunk:
        os.remove(f"{file}/{chunk}")
    elif loss == "replaced" and file.endswith(".zarr"):
        os.rename(file, "old")
        zarr.create_array(Path(file) / str(opened.path), shape=opened.shape, dtype="f4")
    else:
        os.rename(file, "old")
    with pytest.raises(InputError, match="cannot read"):
        lazy.compute()


@pytest.mark.parametrize("how", ["array", "stack", "url", "logged", "zip", "dataset"])
def test_what_is_not_there_at_the_call_is_refused(how: str, here: Path) -> None:
    opened = OPENED[how]()
    for name in os.listdir():
        os.rename(name, f"old-{name}")
    with pytest.raises(InputError, match=r"A is the .* renamed, removed or replaced, or was opened by a relative path"):
        distmm.matmul(opened, B)


def test_an_array_of_another_folder_with_the_same_name_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, dataset = zarr.open_array("a.zarr", mode="r"), h5py.File("a.h5")["a"]
    os.mkdir("other")
    monkeypatch.chdir("other")
    zarr.create_array("a.zarr", shape=(8, 6), dtype="f4")
    with h5py.File("a.h5", "w") as file:
        file["a"] = np.zeros((8, 6))
    for each in (opened, dataset):
        with pytest.raises(InputError, match="opened by a relative path in another working folder"):
            distmm.matmul(each, B)


def test_memory_and_files_of_this_process_are_no_operands_of_a_cluster(here: Path, client: Client) -> None:
    memory = zarr.open_array("memory://x/y", mode="w", shape=A.shape, chunks=(4, 3), dtype="f8")
    memory[...] = A
    written = zarr.create_array(ZipStore("w.zip", mode="w"), data=A, chunks=(4, 3))
    with h5py.File(io.BytesIO(Path("a.h5").read_bytes())) as file:
        for opened, why in [
            (memory, "in the memory of this process"),
            (written, "open for writing"),
            (file["a"], "driver"),
        ]:
            with pytest.raises(InputError, match=rf"A is .*{why}"):
                distmm.matmul(opened, B, client=client)
            with dask.config.set(scheduler="threads"):  # this process reads them itself
                np.testing.assert_array_equal(distmm.matmul(opened, B).compute(), A @ B)
    with dask.config.set(scheduler="processes"), pytest.raises(InputError, match="an operand is a Zarr array in"):
        distmm.matmul(memory, B).compute()


def test_dask_arrays_of_what_workers_would_read_as_empty_are_refused(here: Path, client: Client) -> None:
    memory = zarr.open_array("memory://x/z", mode="w", shape=A.shape, chunks=(4, 3), dtype="f8")
    written = zarr.create_array(ZipStore("w.zip", mode="w"), data=A, chunks=(4, 3))
    for array, why in (memory, "in the memory of this process"), (written, "open for writing"):
        with pytest.raises(InputError, match=rf"A is .*{why}"):
            distmm.matmul(da.from_zarr(array) + 0, B, client=client)


def test_a_closed_dataset_is_refused(here: Path) -> None:
    with h5py.File("a.h5") as file:
        dataset = file["a"]
    with pytest.raises(InputError, match="A is a dataset of an HDF5 file that has been closed"):
        distmm.matmul(dataset, B)


def test_chunks_that_are_missing_at_the_call_are_told(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    for lost in ("a.zarr/c/1/1", "g.zarr/stack/c/1/1/1"):
        os.remove(lost)
    with dask.config.set(scheduler="synchronous"):
        product = distmm.matmul(zarr.open_array("a.zarr"), B).compute()
        assert "a.zarr: 1 of 4 chunks are missing, and read as 0" in caplog.text
        np.testing.assert_array_equal(product[:4], (A @ B)[:4])
        distmm.matmul(zarr.open_group("g.zarr")["stack"], B).compute()
        assert "stack: 1 of 8 chunks are missing" in caplog.text


def test_a_url_is_opened_again_unless_it_needs_options(here: Path) -> None:
    pytest.importorskip("s3fs")
    local = by_path(zarr.open_array(FsspecStore.from_url(f"file://{here}/a.zarr")), "A")
    assert isinstance(local, ZarrMatrix)
    assert local.path == f"{here}/a.zarr"
    for options, expected in [({}, "s3://bucket/a/x"), ({"anon": True}, None)]:
        remote = SimpleNamespace(store=FsspecStore.from_url("s3://bucket/a", storage_options=options), path="x")
        assert opened._place(remote) == expected

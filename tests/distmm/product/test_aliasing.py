"""An array that is written is no operand under another name, and has no element twice."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import h5py
import numpy as np
import pytest
import zarr
from distributed import Client

import distmm
from distmm import storage
from distmm.errors import InputError
from distmm.product.aliasing import coincide, overlap, repeats

SHAPE = (20, 20)


def zarr_array(path: Path, **how: Any) -> zarr.Array[Any]:
    return zarr.create_array(path, shape=SHAPE, chunks=(5, 5), dtype="f8", **how)


def maps(path: Path) -> dict[str, Callable[[], Any]]:
    np.save(path / "a.npy", np.ones(SHAPE))
    return {
        "map": lambda: np.load(path / "a.npy", mmap_mode="r+"),
        "a private map": lambda: np.load(path / "a.npy", mmap_mode="c"),
        "a view of a map": lambda: np.asarray(np.load(path / "a.npy", mmap_mode="r+"))[:, ::-1].T,
        "matrix on disk": lambda: storage.open_matrix(path / "a.npy"),
        "Dask array of a map": lambda: da.from_array(storage.open_matrix(path / "a.npy"), chunks=5) + 1,
    }


def zarrs(path: Path) -> dict[str, Callable[[], Any]]:
    zarr_array(path / "group" / "a")
    (path / "link").symlink_to(path / "group")
    return {
        "array": lambda: zarr.open_array(path / "group" / "a"),
        "member of a group": lambda: zarr.open_group(path / "group")["a"],
        "another path": lambda: zarr.open_array(path / "group" / ".." / "link" / "a", mode="r"),
        "URL": lambda: zarr.open_array(f"file://{path}/group/a"),
        "matrix on disk": lambda: storage.open_matrix(path / "link" / "a"),
        "Dask array": lambda: da.from_zarr(path / "group" / "a") + 1,
        "Dask array with the source in its tasks": lambda: da.from_array(
            zarr.open_array(path / "group" / "a"), inline_array=True
        ),
    }


@pytest.mark.parametrize("kinds", [maps, zarrs])
def test_each_opening_of_one_array_is_recognised(kinds: Any, tmp_path: Path) -> None:
    openings = kinds(tmp_path)
    first = next(iter(openings.values()))()
    for name, opening in openings.items():
        assert overlap(first, opening()), name
        with pytest.raises(InputError, match=r"out shares (memory|storage) with B"):
            distmm.matmul(np.ones(SHAPE), opening(), out=first)


def test_memory_stores_and_datasets_are_told_apart(tmp_path: Path) -> None:
    store, other = zarr.storage.MemoryStore(), zarr.storage.MemoryStore()
    a = zarr.create_array(store, name="a", shape=SHAPE, dtype="f8")
    assert overlap(a, zarr.open_array(store, path="a", mode="r"))
    assert not overlap(a, zarr.create_array(store, name="b", shape=SHAPE, dtype="f8"))
    assert not overlap(a, zarr.create_array(other, name="a", shape=SHAPE, dtype="f8"))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        first, second = (file.create_dataset(name, SHAPE, "f8") for name in "ab")
        file["c"] = first
        assert overlap(first, file["c"])
        assert not overlap(first, second)
        assert overlap(first, storage.open_matrix(tmp_path / "a.h5:/b"))  # which is read from the file as it is then


def test_parts_of_one_file_that_do_not_meet_are_two_arrays(tmp_path: Path) -> None:
    first = np.memmap(tmp_path / "both", "f8", "w+", shape=(40, 20))
    above = np.memmap(tmp_path / "both", "f8", "r+", shape=SHAPE)
    below = np.memmap(tmp_path / "both", "f8", "r+", offset=20 * 20 * 8, shape=SHAPE)
    assert not overlap(above, below)
    assert not overlap(above, first[20:])
    assert overlap(above, first[19:])
    first[:] = 1
    distmm.matmul(above, above, out=below)
    np.testing.assert_array_equal(first[20:], np.full(SHAPE, 20))


def test_the_c_that_is_added_is_not_the_c_that_is_written(tmp_path: Path) -> None:
    a = np.ones(SHAPE)
    z = zarr_array(tmp_path / "c")
    with pytest.raises(InputError, match="out shares storage with C"):
        distmm.gemm(1, a, a, 1, zarr.open_array(tmp_path / "c"), out=z)


@pytest.mark.parametrize(
    "view",
    [
        np.lib.stride_tricks.as_strided(np.zeros(20), SHAPE, (0, 8)),
        np.lib.stride_tricks.as_strided(np.zeros(39), SHAPE, (8, 8)),
        np.lib.stride_tricks.as_strided(np.zeros(400), SHAPE, (80, -4)),
    ],
    ids=["broadcast", "windows", "halves of elements"],
)
def test_an_array_with_elements_twice_is_refused(view: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"elements of out share memory \(shape \(20, 20\), strides"):
        distmm.matmul(np.ones(SHAPE), np.ones(SHAPE), out=view)


def test_ordinary_views_have_each_element_once() -> None:
    a = np.zeros((4, 6, 8))
    for view in (a, a.T, a[::-1, ::2, ::-3], a[:, :1], np.broadcast_to(a[:1], (1, 6, 8)), a[:0], a[:, None], a[0, 0]):
        assert not repeats(view)


def test_a_read_only_zarr_array_is_refused(tmp_path: Path) -> None:
    zarr_array(tmp_path / "c")
    with pytest.raises(InputError, match="out is read-only"):
        distmm.matmul(np.ones(SHAPE), np.ones(SHAPE), out=zarr.open_array(tmp_path / "c", mode="r"))


def test_an_hdf5_dataset_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    a = np.ones((4, 4))
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["c"] = a
    with h5py.File(tmp_path / "c.h5", "r") as file:
        dataset = file["c"]
        with pytest.raises(InputError, match="out is read-only"):
            distmm.matmul(a, a, out=dataset)
    with pytest.raises(InputError, match="out is a dataset of an HDF5 file that has been closed"):
        distmm.matmul(a, a, out=dataset)


def test_views_of_one_array_whose_elements_are_different_are_two_arrays(tmp_path: Path, client: Client) -> None:
    for whole in (np.empty((30, 30)), np.memmap(tmp_path / "whole", "f8", "w+", shape=(30, 30))):
        whole[:] = np.random.default_rng(0).integers(-9, 9, (30, 30))
        below, right, rest = whole[10:, :10], whole[:10, 10:], whole[10:, 10:]
        for where in (None, client):
            distmm.matmul(below, right, out=rest, client=where)
            np.testing.assert_array_equal(rest, below @ right)
            if not isinstance(whole, np.memmap):  # the update of the rest in a blocked factorization
                distmm.gemm(-1, below, right, 1, rest, out=rest, client=where)
                assert not rest.any()
        assert not overlap(whole[::2, 1:], whole[1::2, :-1])
        assert overlap(whole[::2, 1:], whole[2:3, :2])
        with pytest.raises(InputError, match="out shares memory with B"):
            distmm.matmul(below[:10], right[:, :10], out=right[:, 9:19])


@pytest.mark.parametrize("shape", [(130, 4, 4), (4, 130, 130)])
def test_products_of_united_chunks_are_operands_of_products_that_are_written(shape: tuple[int, ...]) -> None:
    a = np.arange(np.prod(shape), dtype="f8").reshape(shape) % 7
    A = da.from_array(a, chunks=(1, 4, 4) if shape[0] > 4 else (4, 20, 20))
    for B, b in (A, a), (A[0, 0], a[0, 0]):  # their product has three dimensions, or two
        C, c = distmm.matmul(A, B), a @ b
        assert isinstance(C, da.Array)
        assert "chunks" in C.name
        written = np.empty((*c.shape[:-2], c.shape[-1], c.shape[-1]))
        Ct = C.swapaxes(-1, -2)
        np.testing.assert_array_equal(distmm.matmul(Ct, C, out=written), c.swapaxes(-1, -2) @ c)


def test_arrays_that_are_hard_to_compare_may_share_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.zeros(10**6, "u1")
    strided = np.lib.stride_tricks.as_strided
    first, second = strided(whole, (50, 50, 50), (991, 37, 7)), strided(whole[1:], (50, 50, 50), (983, 41, 14))
    monkeypatch.setattr("distmm.product.aliasing.MOST_STEPS", 1)
    assert overlap(first, second)


class OnGpu:
    """A CuPy array, as far as its place in memory goes."""

    __module__ = "cupy"

    def __init__(self, address: int, array: np.ndarray) -> None:
        self.data = types.SimpleNamespace(ptr=address)
        self.shape, self.strides, self.dtype = array.shape, array.strides, array.dtype
        self.size, self.itemsize = array.size, array.itemsize
        self.__cuda_array_interface__ = {"data": (address, False)}


def test_arrays_on_gpus_are_compared_by_their_addresses() -> None:
    whole = np.zeros((4, 8), "f4")
    first = OnGpu(1024, whole)
    assert overlap(first, OnGpu(1024 + 127, whole))
    assert not overlap(first, OnGpu(1024 + 128, whole))
    assert not overlap(first, OnGpu(1024, whole[:0]))
    assert not overlap(OnGpu(1024, whole[:, :4]), OnGpu(1024 + 16, whole[:, 4:]))
    assert overlap(OnGpu(1024 + 96, whole[::-1]), OnGpu(1024, whole[:1]))
    assert not overlap(OnGpu(1024 + 96, whole[::-1]), OnGpu(1024 + 128, whole[:1]))
    assert not overlap(first, whole)
    assert coincide(first, OnGpu(1024, whole))
    assert not coincide(first, OnGpu(1024, whole.T))
    assert not coincide(first, whole)

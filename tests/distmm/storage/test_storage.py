"""Matrices on disk are indexed as NumPy arrays are, with the same results."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import zarr

from distmm.errors import InputError
from distmm.storage import locate, open_matrix
from distmm.storage.matrix import Matrix
from distmm.transfer import block_memory
from distmm.transfer.block_memory import HUGE_PAGE, BlockMemory
from tests.distmm.storage.samples import DTYPES, FORMS, sample, save_matrix, stored


@pytest.mark.parametrize("form", FORMS)
def test_reading_follows_numpys_rules_for_basic_indices(form: str, tmp_path: Path) -> None:
    values = sample()
    matrix = open_matrix(stored(form, tmp_path, values))
    assert (matrix.shape, matrix.dtype, matrix.nbytes, matrix.ndim, len(matrix)) == ((13, 9), values.dtype, 936, 2, 13)
    for key in [
        ...,
        np.s_[2:7, 3:9],
        np.s_[:, -2:],
        np.s_[::-1, ::-3],
        np.s_[10:2:-4, 1::2],
        np.s_[-1],
        np.s_[3, -9],
        np.s_[..., 4],
        np.s_[5:5],
        np.s_[5:5, ::2],
        np.s_[7:100],
        np.s_[2, 5:1],
        np.s_[np.int64(3)],
    ]:
        np.testing.assert_array_equal(matrix[key], values[key], strict=True)
    np.testing.assert_array_equal(np.asarray(matrix), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["npy-c", "zarr2", "plain2", "plain3", "hdf5"])
def test_every_numeric_dtype_is_read_in_native_order(form: str, dtype: str, tmp_path: Path) -> None:
    values = sample(dtype=dtype)
    block = open_matrix(stored(form, tmp_path, values))[3:5]
    np.testing.assert_array_equal(block, values[3:5])
    assert block.dtype == values.dtype.newbyteorder("=")
    assert block.dtype.isnative


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_travels_as_its_path(form: str, tmp_path: Path) -> None:
    values = sample()
    matrix = open_matrix(stored(form, tmp_path, values))
    data = pickle.dumps(matrix)
    assert len(data) < 1000
    np.testing.assert_array_equal(pickle.loads(data)[1:5, 3:], values[1:5, 3:])


def test_blocks_are_copies_that_keep_the_files_order(tmp_path: Path) -> None:
    values = sample()
    block = open_matrix(stored("npy-f", tmp_path, values))[2:9, 1:7]
    assert type(block) is np.ndarray
    assert block.flags.f_contiguous
    assert block.flags.writeable
    assert not isinstance(block.base, np.memmap)


def test_two_openings_of_a_path_have_different_tokens_and_one_has_the_same(tmp_path: Path) -> None:
    from dask.base import tokenize

    path = stored("npy-c", tmp_path, sample())
    first, second = open_matrix(path), open_matrix(path)
    assert tokenize(first) == tokenize(first) == tokenize(pickle.loads(pickle.dumps(first)))
    assert tokenize(first) != tokenize(second)


def test_a_file_or_group_with_one_matrix_needs_no_name(tmp_path: Path) -> None:
    values = sample()
    with h5py.File(tmp_path / "one.h5", "w") as file:
        file["a/b"], file["axis"] = values, np.arange(3)
    np.testing.assert_array_equal(open_matrix(tmp_path / "one.h5")[...], values)
    group = zarr.open_group(tmp_path / "one.zarr", mode="w")
    group.create_array("A", data=values)
    group.create_array("axis", data=np.arange(3))
    np.testing.assert_array_equal(open_matrix(tmp_path / "one.zarr")[...], values)


@pytest.mark.parametrize("form", FORMS)
def test_the_url_of_a_file_is_another_name_of_its_path(form: str, tmp_path: Path) -> None:
    path = stored(form, tmp_path, sample())
    for scheme in ("file://", "FILE://localhost", "local://"):
        assert open_matrix(f"{scheme}{path}").path == open_matrix(path).path
        assert locate(f"{scheme}{tmp_path}/C.h5:x") == (f"{tmp_path}/C.h5", "/x")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
def test_chunks_that_are_plain_files_are_read_as_zarr_reads_them(
    version: int, separator: str, dtype: str, tmp_path: Path
) -> None:
    names = {"name": "v2" if version == 2 else "default", "separator": separator}
    array = zarr.create_array(
        tmp_path / "A.zarr", shape=(37, 53), chunks=(10, 16), dtype=dtype, compressors=None, zarr_format=version,
        chunk_key_encoding=names, fill_value=7,
    )  # fmt: skip
    array[:30] = np.arange(30 * 53, dtype=dtype).reshape(30, 53)  # the last row of chunks is never written
    matrix = open_matrix(tmp_path / "A.zarr")
    assert (matrix.plain is None) == (version == 2 and dtype == ">f4")
    for rows, columns in [((0, 37), (0, 53)), ((10, 30), (16, 48)), ((3, 29), (5, 50)), ((5, 6), (47, 53))]:
        at = slice(*rows), slice(*columns)
        np.testing.assert_array_equal(matrix[at], array[at])
    assert matrix[...].dtype == np.dtype("f4")


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(5000 * 3.0).reshape(5000, 3)  # more rows than one call fills
    path = tmp_path / "A.zarr"
    zarr.create_array(path, data=values, chunks=(5000, 2), compressors=None)
    matrix, read = open_matrix(path), os.preadv
    np.testing.assert_array_equal(matrix[...], values)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:5]], at))
    np.testing.assert_array_equal(matrix[:50], values[:50])


RAW = ["float32", "complex64", "bfloat16", ">f4", ">i4", ">c8", "<f8"]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", RAW)
def test_raw_binary_needs_its_shape_and_type(order: str, dtype: str, tmp_path: Path) -> None:
    values = sample(dtype="float32").astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    (tmp_path / "A.bin").write_bytes(values.tobytes(order=order))
    path = f"{tmp_path}/A.bin:13x9:{dtype}{':F' * (order == 'F')}"
    matrix = pickle.loads(pickle.dumps(open_matrix(path)))
    assert matrix.dtype.isnative
    np.testing.assert_array_equal(matrix[2:9, 1:7], values[2:9, 1:7])
    np.testing.assert_array_equal(open_matrix(matrix.path)[::-1, 3], values[::-1, 3])
    for wrong, message in [(f"13x10:{dtype}", "the file has"), ("13x9:words", "not a type of elements")]:
        with pytest.raises(InputError, match=message):
            open_matrix(f"{tmp_path}/A.bin:{wrong}")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0)])
def test_raw_binary_may_be_empty(shape: tuple[int, int], order: str, tmp_path: Path) -> None:
    (tmp_path / "A.bin").write_bytes(b"")
    matrix = open_matrix(f"{tmp_path}/A.bin:{shape[0]}x{shape[1]}:float32:{order}")
    assert matrix[...].shape == np.asarray(matrix).shape == shape
    assert matrix.columns_first in (True, False)  # asks the file, as jobs do


def test_line_breaks_in_a_path_change_no_format(tmp_path: Path) -> None:
    folder, values = tmp_path / "new\nline", np.ones((3, 4))
    folder.mkdir()
    save_matrix(folder / "A.h5", values)
    (folder / "A.bin").write_bytes(values.tobytes())
    for name in ("A.h5", "A.bin:3x4:float64"):
        np.testing.assert_array_equal(open_matrix(f"{folder}/{name}")[...], values)
    assert locate(f"{folder}/C.h5:/x") == (f"{folder}/C.h5", "/x")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_the_metadata_of_an_array_count_where_consolidated_ones_are_older(version: Any, tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "G.zarr", zarr_format=version)
    group.create_array("old", data=np.ones((4, 4)))
    group.create_array("A", data=np.ones((4, 6)), chunks=(2, 2))
    zarr.consolidate_metadata(tmp_path / "G.zarr")
    shutil.rmtree(tmp_path / "G.zarr/old")
    zarr.open_array(tmp_path / "G.zarr/A").resize((4, 4))
    matrix = open_matrix(tmp_path / "G.zarr")
    np.testing.assert_array_equal(matrix[...], np.ones((4, 4)))
    assert matrix.fingerprint() == open_matrix(tmp_path / "G.zarr/A").fingerprint()


def test_sharded_arrays_are_read(tmp_path: Path) -> None:
    values = sample()
    zarr.create_array(tmp_path / "A.zarr", data=values, chunks=(2, 2), shards=(4, 6))
    matrix = open_matrix(tmp_path / "A.zarr")
    np.testing.assert_array_equal(matrix[3:11, ::-1], values[3:11, ::-1])


@pytest.mark.parametrize("version", [2, 3])
def test_object_stores_are_read_through_fsspec(version: int, tmp_path: Path) -> None:
    values = sample()
    store = zarr.storage.FsspecStore.from_url(f"memory://bucket{version}/A.zarr")
    zarr.create_array(store, data=values, chunks=(4, 4), zarr_format=version)
    matrix = pickle.loads(pickle.dumps(open_matrix(f"memory://bucket{version}/A.zarr")))
    np.testing.assert_array_equal(matrix[3:11, 2:], values[3:11, 2:])
    with pytest.raises(InputError, match="not a readable Zarr"):
        open_matrix("memory://bucket/nothing.zarr")


@pytest.mark.parametrize("form", ["npy-c", "zarr2", "zarr3", "hdf5"])
def test_a_changed_matrix_has_another_fingerprint(form: str, tmp_path: Path) -> None:
    values = sample()
    path = stored(form, tmp_path, values)
    first = open_matrix(path).fingerprint()
    assert first == open_matrix(path).fingerprint() == json.loads(json.dumps(first))
    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path.partition(":")[0])
    stored(form, tmp_path, values.astype("float32"))
    changed = open_matrix(path).fingerprint()
    assert {name for name in first if first[name] != changed[name]} >= {"dtype"}
    assert first["path"] == changed["path"]


def test_matrices_are_abstract() -> None:
    with pytest.raises(TypeError):
        Matrix("x", (1, 1), np.dtype("f4"), None)  # type: ignore[abstract]


@pytest.mark.parametrize(("rows", "fills"), [(1024, True), (1023, False)])
@pytest.mark.parametrize("name", ["A.npy", "A.zarr"])
def test_blocks_that_fill_huge_pages_begin_at_one_and_others_take_no_more_memory(
    name: str, rows: int, fills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_memory, "blocks", BlockMemory())
    values = np.arange(rows * 1024, dtype="f4").reshape(rows, 1024)
    if name == "A.npy":
        np.save(tmp_path / name, values)
    else:
        zarr.create_array(tmp_path / name, data=values, chunks=(512, 512), compressors=None)
    block = open_matrix(tmp_path / name)[...]
    np.testing.assert_array_equal(block, values)
    owner = block
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    assert owner.nbytes == block.nbytes + fills * HUGE_PAGE
    assert not fills or block.ctypes.data % HUGE_PAGE == 0
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(block)), values)

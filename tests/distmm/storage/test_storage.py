"""Matrices on disk: what is read equals what NumPy would give, and bad files are refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path
from typing import Any, Literal

import h5py
import ml_dtypes
import numcodecs
import numpy as np
import pytest
import zarr

from distmm.checking.checksum import checksum
from distmm.errors import InputError
from distmm.storage import Matrix, open_matrix
from distmm.storage.flat import read_rows
from tests.distmm.storage.samples import DTYPES, sample


def stored(form: str, folder: Path, values: np.ndarray) -> str:
    """Write values in one of the formats with its own library, and return the path to open."""
    name = str(folder / f"A-{form}")
    if form in ("npy-c", "npy-f"):
        np.save(f"{name}.npy", np.asarray(values, order="C" if form == "npy-c" else "F"))
        return f"{name}.npy"
    if form == "hdf5":
        with h5py.File(f"{name}.h5", "w") as file:
            file["group/A"] = values
        return f"{name}.h5:/group/A"
    if form == "group":
        zarr.open_group(f"{name}.zarr", mode="w").create_array("A", data=values, chunks=(4, 4))
        return f"{name}.zarr/A"
    packed = {"compressors": None} if form.startswith("plain") else {}
    zarr.create_array(f"{name}.zarr", data=values, chunks=(4, 4), zarr_format=2 if form.endswith("2") else 3, **packed)
    return f"{name}.zarr"


FORMS = ["npy-c", "npy-f", "zarr2", "zarr3", "plain2", "plain3", "group", "hdf5"]


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


@pytest.mark.parametrize("key", [np.s_[13], np.s_[:, -10], np.s_[0, 0, 0], np.s_[None], [0, 1], True, "a", (..., ...)])
def test_indices_that_storage_cannot_read_are_refused(key: Any, tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        open_matrix(stored("npy-c", tmp_path, sample()))[key]


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


def test_a_url_is_read_as_zarr(tmp_path: Path) -> None:
    values = sample()
    np.testing.assert_array_equal(open_matrix(f"file://{stored('zarr3', tmp_path, values)}")[2:4], values[2:4])


def damaged_metadata(folder: Path, form: str, **changes: Any) -> str:
    path = Path(stored(form, folder, sample()))
    file = path / (".zarray" if form == "zarr2" else "zarr.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(path)


def test_what_cannot_be_opened_is_refused_with_path_and_reason(tmp_path: Path) -> None:
    values = sample()
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(tmp_path / "objects.npy", np.array([[1, None]], dtype=object))
    np.save(tmp_path / "names.npy", np.array([["a", "b"]]))
    np.save(tmp_path / "records.npy", np.zeros((2, 2), [("x", "f4")]))
    np.save(tmp_path / "long.npy", values.astype("longdouble"))
    np.save(tmp_path / "dates.npy", values.astype("int64").astype("M8[s]"))
    np.save(tmp_path / "vector.npy", values[0])
    np.save(tmp_path / "stack.npy", values[None])
    np.save(tmp_path / "short.npy", values)
    os.truncate(tmp_path / "short.npy", 200)
    (tmp_path / "text.npy").write_text("1 2 3")
    (tmp_path / "text.h5").write_text("1 2 3")
    (tmp_path / "text.csv").write_text("1,2,3")
    (tmp_path / "plain").mkdir()
    (tmp_path / "zero.zarr").mkdir()
    (tmp_path / "zero.zarr" / "zarr.json").write_bytes(b"")
    zarr.open_group(tmp_path / "bare.zarr", mode="w")
    two = zarr.open_group(tmp_path / "two.zarr", mode="w")
    two.create_array("A", data=values)
    two.create_array("B", data=values)
    zarr.create_array(tmp_path / "cube.zarr", data=values[None])
    with h5py.File(tmp_path / "two.h5", "w") as file:
        file["A"], file["B"], file["names"], file["null"] = values, values, [b"a"], h5py.Empty("f4")
    with h5py.File(tmp_path / "names.h5", "w") as file:
        file["A"] = np.array([[b"a", b"b"]])
    cases = {
        "nothing.npy": "no such file",
        "nothing.h5:/A": "no such file",
        "empty.npy": "not a readable .npy",
        "objects.npy": "not a readable .npy",
        "names.npy": "<U1 elements",
        "records.npy": "elements, which cannot be multiplied",
        "long.npy": "float128 elements",
        "dates.npy": "datetime64",
        "vector.npy": "1 dimensions, and a matrix has 2",
        "stack.npy": r"\(1, 13, 9\)",
        "short.npy": "not a readable .npy",
        "text.npy": "magic string",
        "text.h5": "not a readable HDF5",
        "text.csv": "unknown format",
        "plain": "not a readable Zarr",
        "zero.zarr": "not a readable Zarr",
        "bare.zarr": "holds nothing",
        "two.zarr": r"A \(13, 9\), B \(13, 9\).*two.zarr/[AB]",
        "cube.zarr": "3 dimensions",
        "two.h5": r"/A \(13, 9\), /B \(13, 9\).*two.h5:/A",
        "two.h5:/C": "no dataset '/C'; it holds /A, /B",
        "two.h5:/null": "0 dimensions",
        "names.h5": "elements, which cannot be multiplied",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            open_matrix(tmp_path / name)
        assert str(tmp_path) in str(caught.value), name


@pytest.mark.parametrize("form", ["zarr2", "zarr3"])
@pytest.mark.parametrize("shape", [[float("nan"), 9], [-13, 9], "13x9", None, [13]])
def test_zarr_with_impossible_sizes_is_refused(form: str, shape: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"A-zarr.\.zarr"):
        open_matrix(damaged_metadata(tmp_path, form, shape=shape))


def test_zarr_with_chunks_of_length_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="metadata"):
        open_matrix(damaged_metadata(tmp_path, "zarr2", chunks=[0, 4]))


def test_data_that_vanish_or_rot_are_reported_when_they_are_read(tmp_path: Path) -> None:
    gone = open_matrix(stored("npy-c", tmp_path, sample()))
    os.unlink(gone.path)
    with pytest.raises(InputError, match=r"cannot read \[2:4, 0:9\].*No such file"):
        gone[2:4]
    rotten = open_matrix(stored("zarr2", tmp_path, sample()))
    (Path(rotten.path) / "0.0").write_bytes(b"rot")
    with pytest.raises(InputError, match="cannot read"):
        rotten[2:4]
    short = open_matrix(stored("plain3", tmp_path, sample()))
    os.truncate(Path(short.path) / "c" / "0" / "1", 9)
    with pytest.raises(InputError, match=r"chunk c/0/1 has 9 bytes, not 128"):
        short[2:4]


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


def test_a_call_that_reads_less_than_asked_for_is_followed_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(5000 * 3.0).reshape(5000, 3)  # more rows than one call fills
    path = tmp_path / "A.zarr"
    zarr.create_array(path, data=values, chunks=(5000, 2), compressors=None)
    matrix, read = open_matrix(path), os.preadv
    np.testing.assert_array_equal(matrix[...], values)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:5]], at))
    np.testing.assert_array_equal(matrix[:50], values[:50])


@pytest.mark.parametrize(("order", "dtype"), [("C", "float32"), ("F", "complex64"), ("C", "bfloat16")])
def test_raw_binary_needs_its_shape_and_type(order: str, dtype: str, tmp_path: Path) -> None:
    values = sample(dtype="float32").astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    (tmp_path / "A.bin").write_bytes(values.tobytes(order=order))
    path = f"{tmp_path}/A.bin:13x9:{dtype}{':F' * (order == 'F')}"
    matrix = pickle.loads(pickle.dumps(open_matrix(path)))
    np.testing.assert_array_equal(matrix[2:9, 1:7], values[2:9, 1:7])
    np.testing.assert_array_equal(open_matrix(matrix.path)[::-1, 3], values[::-1, 3])
    for wrong, message in [(f"13x10:{dtype}", "the file has"), ("13x9:words", "no type of elements")]:
        with pytest.raises(InputError, match=message):
            open_matrix(f"{tmp_path}/A.bin:{wrong}")


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


@pytest.mark.parametrize(("form", "reader", "method"), [("zarr3", zarr.Array, "__getitem__"), ("plain3", os, "preadv")])
def test_a_zarr_array_that_goes_while_it_is_read_is_not_read_as_zeros(
    form: str, reader: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(form, tmp_path, sample())
    matrix, read = open_matrix(path), getattr(reader, method)

    def vanish_first(*asked: Any) -> Any:
        shutil.rmtree(path, ignore_errors=True)
        return read(*asked)

    with monkeypatch.context() as patch:
        patch.setattr(reader, method, vanish_first)
        with pytest.raises(InputError, match="cannot read"):
            matrix[...]
    stored(form, tmp_path, sample()[:5, :])
    with pytest.raises(InputError, match="has been replaced since it was opened"):
        matrix[:2, :2]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_file_that_loses_its_end_while_it_is_read_kills_nobody(order: Literal["C", "F"], tmp_path: Path) -> None:
    """Touching the pages of a map beyond the end of its file is a bus error, which ends the process."""
    values = np.ones((1000, 900), order=order)
    values.tofile(tmp_path / "A.bin") if order == "C" else values.T.tofile(tmp_path / "A.bin")
    mapped = np.memmap(tmp_path / "A.bin", values.dtype, "r", 0, values.shape, order)
    os.truncate(tmp_path / "A.bin", 8 * 1000)
    with pytest.raises(EOFError, match="the file ends at byte 8000"):
        read_rows(mapped, slice(0, 1000, 1), slice(0, 900, 1))


@pytest.mark.parametrize("name", ["A.npy", "A.h5", "A.h5:/A", "A.bin:1x1:float64", "A.zarr"])
def test_a_pipe_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    for file in ("A.npy", "A.h5", "A.bin"):
        os.mkfifo(tmp_path / file)
    (tmp_path / "A.zarr").mkdir()
    os.mkfifo(tmp_path / "A.zarr" / "zarr.json")
    with pytest.raises(InputError, match="is a pipe, not a file with data"):
        open_matrix(tmp_path / name)


@pytest.mark.parametrize(("form", "chunk"), [("zarr2", "0.0"), ("zarr3", "c/0/0"), ("plain3", "c/0/0")])
def test_a_pipe_among_chunks_is_refused_and_not_waited_for(form: str, chunk: str, tmp_path: Path) -> None:
    matrix = open_matrix(stored(form, tmp_path, sample()))
    (Path(matrix.path) / chunk).unlink()
    os.mkfifo(Path(matrix.path) / chunk)
    with pytest.raises(InputError, match="is a pipe, not a file with data"):
        matrix[2:4]


def bomb(codec: str, length: int) -> bytes:
    """A few kilobytes that unpack to `length` bytes; zstd without the length in its header."""
    if codec != "zstd":
        return bytes(numcodecs.get_codec({"id": codec}).encode(bytes(length)))
    blocks = [min(1 << 17, length - at) for at in range(0, length, 1 << 17)]
    runs = [(2 | size << 3 | (n == len(blocks) - 1)).to_bytes(3, "little") + b"\0" for n, size in enumerate(blocks)]
    return bytes.fromhex("28b52ffd 0038") + b"".join(runs)


OF_3 = {"gzip": zarr.codecs.GzipCodec, "zstd": zarr.codecs.ZstdCodec, "blosc": zarr.codecs.BloscCodec}


@pytest.mark.parametrize(
    ("codec", "version"), [(name, 2) for name in (*OF_3, "zlib", "bz2", "lzma", "lz4")] + [(name, 3) for name in OF_3]
)
def test_a_chunk_unpacks_to_no_more_than_a_chunk(codec: str, version: int, tmp_path: Path) -> None:
    values = sample()
    compressor = OF_3[codec]() if version == 3 else numcodecs.get_codec({"id": codec})
    path = tmp_path / "A.zarr"
    zarr.create_array(path, data=values, chunks=(13, 9), zarr_format=version, compressors=compressor)
    matrix, chunk = open_matrix(path), path / ("c/0/0" if version == 3 else "0.0")
    np.testing.assert_array_equal(matrix[...], values)
    if codec == "zstd":  # as other writers have it, who do not say how long the content is
        chunk.write_bytes(bomb("zstd", values.nbytes))
        assert not matrix[...].any()
    chunk.write_bytes(bomb(codec, 1 << 26))
    tracemalloc.start()
    with pytest.raises(InputError, match=r"unpack to \d+ bytes or more|Destination buffer is too small"):
        matrix[...]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 25  # lzma has a dictionary of 8 MiB


def test_chunks_inside_shards_are_bounded_too(tmp_path: Path) -> None:
    values = np.zeros((64, 64))
    gzip = zarr.codecs.GzipCodec()
    zarr.create_array(tmp_path / "A.zarr", data=values + 1, chunks=(64, 64), shards=(64, 64), compressors=gzip)
    matrix, shard = open_matrix(tmp_path / "A.zarr"), tmp_path / "A.zarr" / "c" / "0" / "0"
    np.testing.assert_array_equal(matrix[...], values + 1)
    inner = bomb("gzip", 1 << 26)
    index = np.array([0, len(inner)], "<u8").tobytes()
    shard.write_bytes(inner + index + checksum(np.frombuffer(index, "u1")).to_bytes(4, "little"))
    with pytest.raises(InputError, match="the gzip data unpack to"):
        matrix[...]


def test_hdf5_data_in_other_files_are_not_read(tmp_path: Path) -> None:
    values = sample()
    values.tofile(tmp_path / "raw.bin")
    with h5py.File(tmp_path / "B.h5", "w") as file:
        file["B"] = values
    with h5py.File(tmp_path / "A.h5", "w") as file:
        file["group/A"] = values
        file["soft"] = h5py.SoftLink("/group")
        file["circle"] = h5py.SoftLink("circle")
        file["out"] = h5py.ExternalLink("B.h5", "/")
        file["around"] = h5py.SoftLink("out/B")
        file.create_dataset("raw", values.shape, values.dtype, external=[(str(tmp_path / "raw.bin"), 0, values.nbytes)])
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        layout[...] = h5py.VirtualSource(str(tmp_path / "B.h5"), "B", values.shape)
        file.create_virtual_dataset("virtual", layout)
    for name in ("group/A", "/soft/A"):
        np.testing.assert_array_equal(open_matrix(tmp_path / f"A.h5:{name}")[2:5], values[2:5])
    (tmp_path / "B.h5").unlink()  # a link is refused before the other file is looked for
    cases = {
        "out/B": "a link to / in another file, B.h5",
        "around": "a link to / in another file, B.h5",
        "raw": "external storage.*copy the elements",
        "virtual": "a virtual dataset.*copy the elements",
        "circle": "no dataset 'circle'",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message):
            open_matrix(tmp_path / f"A.h5:{name}")


def test_matrices_are_abstract() -> None:
    with pytest.raises(TypeError):
        Matrix("x", (1, 1), np.dtype("f4"), None)  # type: ignore[abstract]

"""Files that are damaged, removed, or no matrices are refused with the path and the reason."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import pytest
import zarr

from distmm.errors import InputError
from distmm.storage import file_of, locate, open_matrix
from tests.distmm.storage.samples import sample, stored


@pytest.mark.parametrize("key", [np.s_[13], np.s_[:, -10], np.s_[0, 0, 0], np.s_[None], [0, 1], True, "a", (..., ...)])
def test_indices_that_storage_cannot_read_are_refused(key: Any, tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        open_matrix(stored("npy-c", tmp_path, sample()))[key]


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
    np.save(tmp_path / "brain.npy", values.astype("bfloat16"))
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
        "brain.npy": r"bfloat16, whose type \.npy files do not keep, give x\.view\(ml_dtypes\.bfloat16\)",
        "long.npy": "float128 elements",
        "dates.npy": "datetime64",
        "vector.npy": "1 dimensions, and a matrix has 2",
        "stack.npy": r"\(1, 13, 9\)",
        "short.npy": "not a readable .npy",
        "text.npy": "magic string",
        "text.h5": "not a readable HDF5",
        "text.csv": "unknown format",
        "plain": "it has no zarr.json, .zarray or .zgroup.*; distmm reads name.npy",
        "zero.zarr": "not a readable Zarr",
        "bare.zarr": "has nothing",
        "two.zarr": r"A \(13, 9\), B \(13, 9\).*two.zarr/[AB]",
        "cube.zarr": "3 dimensions",
        "two.h5": r"/A \(13, 9\), /B \(13, 9\).*two.h5:/A",
        "two.h5:/C": "no dataset '/C'; the file has /A, /B",
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


@pytest.mark.parametrize("shape", ["(-1, 9)", "(2**9, 9)", "(13, 9), []: 1", "(13, None)", "(" * 100])
def test_npy_headers_with_impossible_shapes_are_refused(shape: str, tmp_path: Path) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    path = tmp_path / "odd.npy"
    path.write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(1000))
    with pytest.raises(InputError, match=r"odd\.npy: not a readable \.npy file"):
        open_matrix(path)


def test_data_that_were_removed_or_damaged_are_reported_when_they_are_read(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("form", "reader", "method"), [("zarr3", zarr.Array, "__getitem__"), ("plain3", os, "preadv")])
def test_a_zarr_array_that_is_removed_while_it_is_read_is_not_read_as_zeros(
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
def test_a_file_truncated_while_it_is_read_is_an_error_and_no_crash(order: Literal["C", "F"], tmp_path: Path) -> None:
    """A read of a memory map beyond the end of its file is a bus error, which kills the process."""
    values = np.ones((1000, 900), order=order)
    values.tofile(tmp_path / "A.bin") if order == "C" else values.T.tofile(tmp_path / "A.bin")
    matrix = open_matrix(f"{tmp_path}/A.bin:1000x900:float64:{order}")
    os.truncate(tmp_path / "A.bin", 8 * 1000)
    with pytest.raises(InputError, match="EOFError: the file ends at byte 8000"):
        matrix[:, :]


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


def test_a_store_without_keys_is_not_called_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    s3fs = pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(InputError, match=r"s3://bucket/A\.zarr: cannot be reached: .*credentials; check its .* keys"):
        open_matrix("s3://bucket/A.zarr")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(InputError, match=r"memory://no/A\.zarr: not a readable Zarr array"):
        open_matrix("memory://no/A.zarr")


def test_an_array_that_one_may_not_read_is_not_called_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "A.zarr", data=np.ones((4, 4)))

    def denied(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("distmm.storage.zarr_folder.open_zarr", denied)
    with pytest.raises(InputError, match=r"A\.zarr: you may not read it: .*Permission denied"):
        open_matrix(tmp_path / "A.zarr")


@pytest.mark.parametrize("name", ["A.npy", "A.h5", "A.bin:4x4:float64"])
def test_a_file_that_one_may_not_read_is_not_called_missing_or_damaged(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / file_of(name)).write_bytes(bytes(128))

    def denied(path: str, mode: str) -> None:  # root may read everything
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(InputError, match=r"A\.\w+: cannot be read: Permission denied; check the permissions of it and"):
        open_matrix(tmp_path / name)


@pytest.mark.parametrize("version", [2, 3])
def test_a_zarr_group_whose_matrices_are_in_other_groups_names_them(version: Literal[2, 3], tmp_path: Path) -> None:
    inside = zarr.create_group(tmp_path / "A.zarr", zarr_format=version).create_group("x/y")
    inside.create_array("A", data=np.ones((4, 5)))
    assert open_matrix(tmp_path / "A.zarr").path == str(tmp_path / "A.zarr/x/y/A")
    inside.create_array("B", data=np.ones((6, 5)))
    with pytest.raises(InputError, match=r"group has x/y/A \(4, 5\), x/y/B \(6, 5\); name .*/A\.zarr/x/y/A"):
        open_matrix(tmp_path / "A.zarr")


def test_a_link_to_itself_is_not_called_missing(tmp_path: Path) -> None:
    os.symlink("A.npy", tmp_path / "A.npy")
    with pytest.raises(InputError, match=r"A\.npy: cannot be read: Too many levels of symbolic links"):
        open_matrix(tmp_path / "A.npy")


def test_empty_names_are_refused() -> None:
    with pytest.raises(InputError, match="the name of a matrix is empty; distmm reads"):
        open_matrix("")
    with pytest.raises(InputError, match="the name of the result is empty; give"):
        locate("")

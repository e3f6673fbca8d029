"""Outputs on disk: complete, under their name only when finished, and never in place of other data."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import zarr

from distmm.errors import InputError
from distmm.storage import create_output, locate, open_matrix, reopen_output
from tests.distmm.storage.samples import DTYPES, sample

TARGETS = ["C.npy", "C", "C.zarr", "C.h5", "C.hdf5", "C.h5:/results/C"]


def fill(target: Any, values: np.ndarray, block: tuple[int, int] = (5, 4)) -> None:
    for i in range(0, values.shape[0], block[0]):
        for j in range(0, values.shape[1], block[1]):
            part = np.s_[i : min(i + block[0], values.shape[0]), j : min(j + block[1], values.shape[1])]
            target[part] = values[part]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_written_in_ragged_blocks_is_read_back(name: str, dtype: str, tmp_path: Path) -> None:
    values = sample(dtype=dtype)
    target = create_output(tmp_path / name, values.shape, values.dtype, (5, 4))
    fill(pickle.loads(pickle.dumps(target)), values)
    assert not os.path.exists(target.output.path)  # it gets its name only when it is complete
    assert target.output.commit() == str(tmp_path / name.partition(":")[0])
    result = open_matrix(tmp_path / name)
    np.testing.assert_array_equal(result[...], values)
    assert result.dtype == values.dtype.newbyteorder("=")
    assert os.listdir(tmp_path) == [name.partition(":")[0]]


def test_whole_rows_are_written_too(tmp_path: Path) -> None:
    values = sample()
    target = create_output(tmp_path / "C.npy", values.shape, values.dtype, (5, 9))
    fill(target, np.asfortranarray(values), (5, 9))
    target.output.commit()
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), values)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0)])
@pytest.mark.parametrize("name", TARGETS)
def test_empty_products_are_written(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    target = create_output(tmp_path / name, shape, "float32", shape)
    target[0 : shape[0], 0 : shape[1]] = np.empty(shape, "float32")
    target.output.commit()
    assert open_matrix(tmp_path / name)[...].shape == shape


def test_zarr_outputs_have_the_blocks_as_chunks(tmp_path: Path) -> None:
    target = create_output(tmp_path / "C.zarr", (13, 9), "float32", (5, 4))
    fill(target, np.ones((13, 9), "float32"))
    target.output.commit()
    assert open_matrix(tmp_path / "C.zarr").chunks == (5, 4)
    assert sum(file.is_file() for file in (tmp_path / "C.zarr" / "c").rglob("*")) == 9


def test_a_member_of_a_zarr_group_can_be_the_output(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "all.zarr", mode="w").create_array("A", data=sample())
    target = create_output(tmp_path / "all.zarr" / "C", (13, 9), "float64", (5, 4))
    fill(target, sample())
    target.output.commit()
    assert set(zarr.open_group(tmp_path / "all.zarr", mode="r").array_keys()) == {"A", "C"}


@pytest.mark.parametrize("name", TARGETS)
def test_another_process_can_continue_a_draft(name: str, tmp_path: Path) -> None:
    values, (path, _) = sample(), locate(tmp_path / name)
    os.makedirs(tmp_path / "job")
    draft = str(tmp_path / "job" / os.path.basename(path))
    first = create_output(tmp_path / name, values.shape, values.dtype, (5, 4), draft=draft)
    first[0:5, 0:4] = values[0:5, 0:4]
    first.sync(slice(0, 5), slice(0, 4))
    again = pickle.loads(pickle.dumps(reopen_output(tmp_path / name, draft)))
    assert again == first
    fill(again, values)
    again.output.commit()
    np.testing.assert_array_equal(open_matrix(tmp_path / name)[...], values)


def test_chunks_of_zeros_are_written_too(tmp_path: Path) -> None:
    target = create_output(tmp_path / "C.zarr", (13, 9), "float32", (5, 4))
    fill(target, np.zeros((13, 9), "float32"))
    target.output.commit()
    assert sum(file.is_file() for file in (tmp_path / "C.zarr" / "c").rglob("*")) == 9


def test_a_draft_that_was_removed_is_not_created_again(tmp_path: Path) -> None:
    target = create_output(tmp_path / "C.zarr", (13, 9), "float32", (5, 4))
    shutil.rmtree(target.output.draft)
    with pytest.raises(FileNotFoundError):
        target[0:5, 0:4] = np.ones((5, 4), "float32")
    assert os.listdir(tmp_path) == []


def test_bfloat16_is_read_from_and_written_to_zarr_only(tmp_path: Path) -> None:
    values = sample(dtype="float32").astype(ml_dtypes.bfloat16)
    target = create_output(tmp_path / "C.zarr", values.shape, values.dtype, (5, 4))
    fill(target, values)
    target.output.commit()
    matrix = pickle.loads(pickle.dumps(open_matrix(tmp_path / "C.zarr")))
    assert (matrix.dtype, matrix.fingerprint()["dtype"]) == (values.dtype, "bfloat16")
    np.testing.assert_array_equal(matrix[2:9, 1:7], values[2:9, 1:7])
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "C.zarr", mode="r")[...], values)
    for name in ("C.npy", "C.h5"):
        with pytest.raises(InputError, match="no type bfloat16"):
            create_output(tmp_path / name, values.shape, values.dtype, (5, 4))


def test_a_block_that_does_not_fill_its_region_is_refused(tmp_path: Path) -> None:
    target = create_output(tmp_path / "C.npy", (4, 4), "float32", (2, 2))
    with pytest.raises(ValueError, match="does not fill"):
        target[0:2, 0:2] = np.zeros((2, 1), "float32")
    with pytest.raises(IndexError, match="a range of rows"):
        target[::2, 0:2] = np.zeros((2, 2), "float32")


def test_an_existing_output_stays_until_the_new_one_is_committed(tmp_path: Path) -> None:
    for name in ["C.npy", "C.zarr", "C.h5"]:
        old, new = sample(), sample() + 1
        first = create_output(tmp_path / name, old.shape, old.dtype, (5, 4))
        fill(first, old)
        first.output.commit()
        with pytest.raises(InputError, match=r"exists.*--overwrite"):
            create_output(tmp_path / name, old.shape, old.dtype, (5, 4))
        second = create_output(tmp_path / name, old.shape, old.dtype, (5, 4), overwrite=True)
        np.testing.assert_array_equal(open_matrix(tmp_path / name)[...], old)
        second.output.discard()
        np.testing.assert_array_equal(open_matrix(tmp_path / name)[...], old)
        third = create_output(tmp_path / name, old.shape, old.dtype, (5, 4), overwrite=True)
        fill(third, new)
        third.output.commit()
        np.testing.assert_array_equal(open_matrix(tmp_path / name)[...], new)
    assert sorted(os.listdir(tmp_path)) == ["C.h5", "C.npy", "C.zarr"]


def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = create_output(tmp_path / "C.npy", (2, 2), "float32", (2, 2))
    np.save(tmp_path / "C.npy", sample())
    with pytest.raises(InputError, match="was created by another program"):
        target.output.commit()
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), sample())


def test_wrong_results_get_names_that_say_so(tmp_path: Path) -> None:
    for expected in ["C.wrong.zarr", "C.wrong-2.zarr"]:
        target = create_output(tmp_path / "C.zarr", (2, 2), "float32", (2, 2))
        assert target.output.set_aside() == str(tmp_path / expected)
        assert os.path.isdir(tmp_path / expected)
    assert not os.path.exists(tmp_path / "C.zarr")


def not_matrices(folder: Path) -> dict[str, str]:
    """Make files and folders that no output may replace; return for each what the error says."""
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter1").write_text("text")
    zarr.open_group(folder / "group.zarr", mode="w").create_array("A", data=sample())
    zarr.create_array(folder / "notes.zarr", data=sample())
    (folder / "notes.zarr" / "notes.txt").write_text("text")
    zarr.create_array(folder / "cube.zarr", data=sample()[None])
    with h5py.File(folder / "two.h5", "w") as file:
        file["A"], file["B"] = sample(), sample()
    with h5py.File(folder / "other.h5", "w") as file:
        file["A"] = sample()
    with h5py.File(folder / "linked.h5", "w") as file:
        file["A"], file["B"] = sample(), h5py.ExternalLink("other.h5", "/A")
    for name in ("text.h5", "text.npy", "text.zarr"):
        (folder / name).write_text("text")
    np.save(folder / "vector.npy", sample()[0])
    np.save(folder / "real.npy", sample())
    (folder / "link.npy").symlink_to("real.npy")
    (folder / "broken.zarr").symlink_to("nothing")
    for name in ("pipe", "pipe.npy", "pipe.zarr", "pipe.h5"):
        os.mkfifo(folder / name)
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):
        server.bind("socket.zarr")
    (folder / "folder.npy").mkdir()
    return {
        "thesis": "not a Zarr array",
        "group.zarr": "not a Zarr array",
        "notes.zarr": "notes.txt",
        "cube.zarr": "3 dimensions",
        "two.h5": "would be lost",
        "two.h5:/A": "would be lost",
        "other.h5:/B": r"has /A, and the whole file would be lost; give \S*/other.h5:/A to replace it, or choose",
        "linked.h5": "would be lost",
        "text.h5": "not an HDF5 file",
        "text.npy": "not a readable .npy",
        "text.zarr": "is a file",
        "vector.npy": "1 dimensions",
        "link.npy": "symbolic link to real.npy",
        "broken.zarr": "symbolic link to nothing",
        "pipe": "is a pipe",
        "pipe.npy": "is a pipe",
        "pipe.zarr": "is a pipe",
        "pipe.h5": "is a pipe",
        "socket.zarr": "is a socket",
        "folder.npy": "is a folder",
    }


def test_overwriting_replaces_nothing_but_a_matrix_of_the_same_format(tmp_path: Path) -> None:
    cases = not_matrices(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for name, message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            create_output(tmp_path / name, (2, 2), "float32", (2, 2), overwrite=True)
        assert "choose another" in str(caught.value) or "remove it yourself" in str(caught.value), name
    assert sorted(tmp_path.rglob("*")) == before
    np.testing.assert_array_equal(np.load(tmp_path / "link.npy"), sample())


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("separator", [".", "/"])
def test_zarr_arrays_of_other_programs_can_be_replaced(version: int, separator: str, tmp_path: Path) -> None:
    names = {"name": "v2" if version == 2 else "default", "separator": separator}
    zarr.create_array(
        tmp_path / "C.zarr", data=sample(), chunks=(5, 4), zarr_format=version, chunk_key_encoding=names,
        attributes={"by": "others"},
    )  # fmt: skip
    create_output(tmp_path / "C.zarr", (2, 2), "float32", (2, 2), overwrite=True).output.discard()


@pytest.mark.parametrize("name", ["A.zarr/C.zarr", "A.zarr/c/0/C.npy", "B.zarr/C"])
def test_nothing_is_written_into_an_array(name: str, tmp_path: Path) -> None:
    for version, array in ((3, "A"), (2, "B")):
        zarr.create_array(tmp_path / f"{array}.zarr", data=sample(), zarr_format=version)
    with pytest.raises(InputError, match=r"is inside the Zarr array .*[AB]\.zarr, which it would damage"):
        create_output(tmp_path / name, (2, 2), "float32", (2, 2))


def test_outputs_that_cannot_be_written_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "A.npy").touch()
    cases = {
        "no/such x/C.npy": r"mkdir -p '.*/no/such x'\)",
        "A.npy/C.npy": r"A\.npy is a file, not a folder; choose another name",
        "C.csv": "cannot write the format '.csv'",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message):
            create_output(tmp_path / name, (2, 2), "float32", (2, 2))
    with pytest.raises(InputError, match="to object stores"):
        create_output("https://example.com/C.zarr", (2, 2), "float32", (2, 2))
    with pytest.raises(InputError, match="elements"):
        create_output(tmp_path / "C.npy", (2, 2), object, (2, 2))
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"needs 4 GB.*has 1 GB free: short by 3 GB"):
        create_output(tmp_path / "C.zarr", (10**5, 10**4), "float32", (1000, 1000))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match="read-only"):
        create_output(tmp_path / "C.npy", (2, 2), "float32", (2, 2))
    assert os.listdir(tmp_path) == ["A.npy"]


@pytest.mark.parametrize("name", ["C.npy", "C.zarr", "C.h5"])
def test_a_folder_that_refuses_the_file_is_an_input_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mount can refuse what permissions allow. Permissions would not stop this test where it runs as root.
    folder = tmp_path / "mount"
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    real = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: True if str(path) == "/proc/mount" else real(path))
    with pytest.raises(InputError, match="cannot be written"):
        create_output(f"/proc/mount/{name}", (2, 2), "float32", (2, 2))

"""Matrices made to run code or to reach other files are refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import zarr

from distmm.errors import InputError
from distmm.storage import create_output, open_matrix


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def _version_2(folder: Path, **changes: object) -> Path:
    metadata = {"zarr_format": 2, "shape": [2, 2], "chunks": [2, 2], "dtype": "<f8", "compressor": None}
    folder.mkdir()
    (folder / ".zarray").write_text(json.dumps(metadata | {"filters": None, "fill_value": 0, "order": "C"} | changes))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"compressor": {"id": "pickle"}},
        {"filters": [{"id": "pickle"}]},
        {"filters": [{"id": "pickle"}], "dtype": "|O"},
        {"filters": [{"id": "base64"}]},
        {"compressor": {"id": "os.system"}},
    ],
)
def test_a_zarr_array_that_would_be_unpickled_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = _version_2(tmp_path / "A.zarr", **changes)
    (folder / "0.0").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    with pytest.raises(InputError):
        open_matrix(folder)[:, :]
    assert not (tmp_path / "owned").exists()


def test_a_codec_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="packed with 'base64', which is not a trusted codec"):
        open_matrix(_version_2(tmp_path / "A.zarr", filters=[{"id": "base64"}]))


@pytest.mark.parametrize("options", [{}, {"zarr_format": 2}, {"shards": (8, 8)}, {"compressors": None}])
def test_the_codecs_that_zarr_uses_by_itself_are_trusted(tmp_path: Path, options: dict[str, object]) -> None:
    array = zarr.create_array(tmp_path / "A.zarr", shape=(8, 8), chunks=(4, 4), dtype="f4", **options)
    array[:] = np.arange(64).reshape(8, 8)
    assert open_matrix(tmp_path / "A.zarr")[2:3, 4:5] == 20


@pytest.mark.parametrize(
    "changes", [{"shape": [-2, 2]}, {"shape": [2, 2, 2]}, {"chunks": [0, 2]}, {"shape": "2x2"}, {"dtype": "<M8[s]"}]
)
def test_damaged_zarr_metadata_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(InputError):
        open_matrix(_version_2(tmp_path / "A.zarr", **changes))


def test_a_zarr_array_of_more_chunks_than_can_be_listed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has 1e\+16 chunks, and distmm reads arrays of at most 1e\+08"):
        open_matrix(_version_2(tmp_path / "A.zarr", shape=[10**14, 10**14], chunks=[10**6, 10**6]))


def test_a_pickle_in_an_npy_file_is_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "A.npy", np.array([[Evil(tmp_path / "owned")]], dtype=object), allow_pickle=True)
    with pytest.raises(InputError):
        open_matrix(tmp_path / "A.npy")
    (tmp_path / "B.npy").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    with pytest.raises(InputError):
        open_matrix(tmp_path / "B.npy")
    assert not (tmp_path / "owned").exists()


def test_an_output_does_not_replace_a_folder_that_is_no_matrix(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not a Zarr array"):
        create_output(tmp_path / "home", (2, 2), "f4", (2, 2), overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "x"

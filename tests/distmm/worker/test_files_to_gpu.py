"""Blocks of files go to a GPU in pieces: each to its place, and no buffer is reused before its copy is done."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import zarr

from distmm.errors import InputError
from distmm.storage import create_output, open_matrix
from distmm.worker import files_to_gpu, gpu, gpu_copies
from distmm.worker.tasks.loads import load

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def stored(folder: Path, form: str) -> tuple[str, np.ndarray]:
    """Write a matrix of 70 x 50 numbers."""
    dtype = np.dtype("float32") if form == "npy" else BFLOAT16
    values = np.random.default_rng(5).standard_normal((70, 50), dtype="f4").astype(dtype)
    if form == "raw":
        values.tofile(folder / "A.bin")
        return f"{folder / 'A.bin'}:70x50:bfloat16", values
    output = create_output(folder / f"A.{form}", values.shape, dtype, (32, 16))
    for i in range(0, 70, 32):
        for j in range(0, 50, 16):
            output[i : min(i + 32, 70), j : min(j + 16, 50)] = values[i : i + 32, j : j + 16]
    output.output.commit()
    return str(folder / f"A.{form}"), values


class Event:
    """An event of a simulated GPU, which copies as late as CUDA allows: when somebody waits for the event."""

    all: ClassVar[list[Event]] = []
    thread = threading.local()

    def __init__(self, **how: Any) -> None:
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []
        self.all.append(self)

    def record(self, stream: None) -> None:
        self.copies, self.thread.asked = self.thread.asked, []

    def synchronize(self) -> None:
        for place, address, pitch in self.copies:
            for number, row in enumerate(place):
                ctypes.memmove(row.ctypes.data, address + number * pitch, row.nbytes)
        self.copies = []


def copy_rows(place: np.ndarray, address: int, pitch: int, stream: None) -> None:
    Event.thread.asked = [(place, address, pitch)]


@contextmanager
def working(work: str) -> Iterator[None]:
    yield
    for event in Event.all:
        event.synchronize()


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let host memory stand for GPU memory, and make buffers smaller than chunks."""
    cuda = SimpleNamespace(
        alloc_pinned_memory=bytearray,
        Event=Event,
        Device=lambda number: nullcontext(),
        runtime=SimpleNamespace(getDevice=lambda: 0),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=np.empty, asarray=np.asarray, cuda=cuda))
    monkeypatch.setattr(gpu, "working", working)
    monkeypatch.setattr(gpu_copies, "copy_rows", copy_rows)
    monkeypatch.setattr(files_to_gpu, "BUFFER", 300)
    with ThreadPoolExecutor(3) as readers:
        monkeypatch.setattr(files_to_gpu, "_readers", lambda: readers)
        yield


def bits(block: np.ndarray) -> bytes:
    return np.ascontiguousarray(block).tobytes()


@pytest.mark.parametrize("form", ["zarr", "npy", "raw"])
def test_every_piece_arrives_at_its_place(form: str, tmp_path: Path, small_buffers: None) -> None:
    path, values = stored(tmp_path, form)
    matrix = open_matrix(path)
    for rows, cols in ((slice(0, 70), slice(0, 50)), (slice(30, 67, None), slice(5, 49)), (slice(3, 4), slice(0, 16))):
        pieces = matrix.pieces(rows, cols, 300)
        assert pieces is not None
        assert max((i.stop - i.start) * (j.stop - j.start) * values.itemsize for i, j in pieces) <= 300
        assert bits(load(matrix, (rows, cols), "cuda")) == bits(values[rows, cols])


@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("form", ["npy", "raw", "zarr"])
def test_a_matrix_without_elements_arrives(
    form: str, shape: tuple[int, int], tmp_path: Path, small_buffers: None
) -> None:
    path = tmp_path / f"A.{form}"
    if form == "npy":
        np.save(path, np.zeros(shape, "f4"))
    elif form == "raw":
        path.touch()
        path = Path(f"{path}:{shape[0]}x{shape[1]}:float32")
    else:
        zarr.create_array(path, shape=shape, dtype="f4", chunks=(2, 2), compressors=None)
    found = load(open_matrix(path), np.s_[:, :], "cuda")
    assert (found.shape, found.dtype) == (shape, np.float32)


def test_what_is_not_read_in_pieces_arrives_too(tmp_path: Path, small_buffers: None) -> None:
    values = np.random.default_rng(6).standard_normal((40, 90), dtype="f4")
    np.save(tmp_path / "F.npy", np.asfortranarray(values))
    np.save(tmp_path / "wide.npy", values)  # each row is larger than a buffer
    zarr.create_array(tmp_path / "packed.zarr", data=values, chunks=(16, 16))
    for name in ("F.npy", "wide.npy", "packed.zarr"):
        matrix = open_matrix(tmp_path / name)
        np.testing.assert_array_equal(load(matrix, np.s_[2:30, 1:88], "cuda"), values[2:30, 1:88])


def test_a_chunk_that_was_never_written_arrives_as_zarr_reads_it(tmp_path: Path, small_buffers: None) -> None:
    path, values = stored(tmp_path, "zarr")
    os.unlink(tmp_path / "A.zarr" / "c" / "1" / "2")
    values[32:64, 32:48] = 0
    assert bits(load(open_matrix(path), np.s_[0:70, 0:50], "cuda")) == bits(values)


def test_a_damaged_chunk_or_another_array_ends_with_its_reason(tmp_path: Path, small_buffers: None) -> None:
    path, _ = stored(tmp_path, "zarr")
    matrix = open_matrix(path)
    os.truncate(tmp_path / "A.zarr" / "c" / "1" / "2", 10)
    with pytest.raises(InputError, match=r"chunk c/1/2 has 10 bytes, not 1024"):
        load(matrix, np.s_[0:70, 0:50], "cuda")
    shutil.rmtree(path)
    create_output(path, (70, 50), "uint16", (32, 16)).output.commit()
    zarr.open_array(path)[...] = np.ones((70, 50), "uint16")
    with pytest.raises(InputError, match="has been replaced"):
        load(matrix, np.s_[0:20, 0:20], "cuda")


@pytest.mark.gpu
def test_a_block_of_a_file_arrives_on_the_gpu(tmp_path: Path) -> None:
    values = np.random.default_rng(7).standard_normal((5000, 9000), dtype="f4")
    output = create_output(tmp_path / "A.zarr", values.shape, values.dtype, (4096, 4096))
    for i in range(0, 5000, 4096):
        for j in range(0, 9000, 4096):
            output[i : min(i + 4096, 5000), j : min(j + 4096, 9000)] = values[i : i + 4096, j : j + 4096]
    output.output.commit()
    matrix = open_matrix(tmp_path / "A.zarr")
    for _ in range(3):  # from the second time on, buffers are reused
        block = load(matrix, np.s_[100:4900, 7:8999], "cuda")
        np.testing.assert_array_equal(block.get(), values[100:4900, 7:8999])

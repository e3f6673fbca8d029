"""Copies between the client's memory and the GPU: both directions, pinned or not, any layout."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from distmm import transfer
from distmm.transfer import ClientArray, process_memory
from distmm.transfer.write_lease import Lease
from distmm.worker import client_output, gpu_copies
from distmm.worker.client_output import ClientOutput
from distmm.worker.tasks import loads
from distmm.worker.tasks.loads import load

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda a: a,
    "transposed": lambda a: a.swapaxes(-1, -2),
    "rows from the last": lambda a: a[..., ::-1, :],
    "columns of a wider one": lambda a: a[..., 3:200],
}


def filled(shape: tuple[int, ...], pinned: bool) -> np.ndarray:
    array = transfer.empty(shape, "f4") if pinned else np.empty(shape, "f4")
    array[...] = np.random.default_rng(1).standard_normal(shape, dtype="f4")
    return array


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(700, 300), (3, 70, 300), (1, 300)])
def test_a_block_arrives_on_the_gpu_and_comes_back(shape: tuple[int, ...], layout: str, pinned: bool) -> None:
    array = LAYOUTS[layout](filled(shape, pinned))
    index = tuple(slice(n // 3, n - n // 4) for n in array.shape)
    block = gpu_copies.upload(ClientArray.of(array).part(index))
    np.testing.assert_array_equal(block.get(), array[index])
    back = LAYOUTS[layout](filled(shape, pinned))
    expected = back.copy()
    expected[index] = 2 * array[index]
    ClientOutput(ClientArray.of(back))[index] = 2 * block
    np.testing.assert_array_equal(back, expected)


@pytest.mark.gpu
def test_pieces_larger_than_the_staging_buffers_arrive() -> None:
    array = np.random.default_rng(2).standard_normal((5 * gpu_copies.STAGE // 2 // 6000, 1500), dtype="f4")
    block = gpu_copies.upload(ClientArray.of(array).part((slice(None), slice(1, 1400))))
    assert block.nbytes > 2 * gpu_copies.STAGE
    np.testing.assert_array_equal(block.get(), array[:, 1:1400])
    np.testing.assert_array_equal(gpu_copies.to_host(block), array[:, 1:1400])


class Stream:
    """A simulated stream: its work is done when somebody waits for it."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []

    def finish(self) -> None:
        while self.asked:
            self.asked.pop(0)()


STREAM = Stream()


class Event:
    def __init__(self, **how: Any) -> None:
        """Take the options of CuPy's event."""

    def record(self, stream: Stream) -> None:
        """Do nothing: `synchronize` waits for all work of the stream."""

    def synchronize(self) -> None:
        STREAM.finish()


@contextmanager
def working(work: str) -> Iterator[Stream]:
    yield STREAM
    STREAM.finish()


def copy_rows(device: np.ndarray, address: int, pitch: int, stream: Stream, to_host: bool = False) -> None:
    sides = [(row.ctypes.data, address + n * pitch) for n, row in enumerate(device)]
    nbytes = device[0].nbytes
    stream.asked.append(lambda: [ctypes.memmove(*(side[::-1] if to_host else side), nbytes) for side in sides] and None)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let host memory stand for a GPU that copies as late as CUDA allows, and make staging buffers small."""
    cuda = types.SimpleNamespace(alloc_pinned_memory=bytearray, Event=Event)
    cupy = types.SimpleNamespace(empty=np.empty, asarray=np.array, ascontiguousarray=np.ascontiguousarray, cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name, value in {"copy_rows": copy_rows, "STAGE": 1000, "_idle": []}.items():
        monkeypatch.setattr(gpu_copies, name, value)
    monkeypatch.setattr(gpu_copies.gpu, "working", working)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(70, 300), (3, 40, 300), (1, 300)])
def test_a_worker_copies_memory_of_its_own_process_without_the_system(
    shape: tuple[int, ...], layout: str, simulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "_copy_pieces", lambda *about: pytest.fail("the system was asked for memory"))
    array = LAYOUTS[layout](filled(shape, pinned=False))
    index = tuple(slice(n // 3, n - n // 4) for n in array.shape)
    block = gpu_copies.upload(ClientArray.of(array).part(index))
    np.testing.assert_array_equal(block, array[index])
    back = LAYOUTS[layout](filled(shape, pinned=False))
    expected = back.copy()
    expected[index] = 2 * array[index]
    gpu_copies.download(ClientArray.of(back).part(index), 2 * block)
    np.testing.assert_array_equal(back, expected)


def test_blocks_come_in_pieces_and_go_back_without_the_system(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_copy_pieces", lambda *about: pytest.fail("the system was asked for memory"))
    array = filled((50, 100), pinned=False)
    pieces = list(gpu_copies.pieces(array))
    assert len(pieces) == 25
    np.testing.assert_array_equal(np.concatenate(pieces), array)
    np.testing.assert_array_equal(gpu_copies.to_host(array.view(GpuBlock)), array)


class GpuBlock(np.ndarray):
    """A NumPy array that claims to lie in GPU memory."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}

    def get(self, out: np.ndarray) -> None:
        """Copy it to the host."""
        out[...] = self


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of work for which tasks released their slots."""
    kinds: list[str] = []

    @contextmanager
    def noted(kind: str) -> Iterator[None]:
        kinds.append(kind)
        yield

    monkeypatch.setattr(client_output, "slot_released", noted)
    monkeypatch.setattr(loads, "slot_released", noted)
    return kinds


def test_loads_and_stores_of_gpu_blocks_release_their_slots(simulated: None, released: list[str]) -> None:
    array, out = filled((70, 300), pinned=False), np.zeros((70, 300), "f4")
    index = slice(3, 50), slice(7, 290)
    block = load(ClientArray.of(array), index, "cuda")
    np.testing.assert_array_equal(block, array[index])
    assert released == ["load"]
    ClientOutput(ClientArray.of(out))[index] = block.view(GpuBlock)
    assert released == ["load", "store"]
    ClientOutput(ClientArray.of(out))[slice(60, 61), slice(0, 300)] = np.ones((1, 300), "f4")
    assert released == ["load", "store"]  # a block of host memory is written while the task keeps its slot
    expected = np.zeros((70, 300), "f4")
    expected[index], expected[60] = array[index], 1
    np.testing.assert_array_equal(out, expected)


def test_gpu_blocks_are_stored_only_while_the_lease_lasts(simulated: None, released: list[str]) -> None:
    out, index = np.zeros((70, 300), "f4"), (slice(0, 70), slice(0, 300))
    shared = replace(ClientArray.of(out), lease=Lease.begin())
    assert shared.lease is not None
    block = filled((70, 300), pinned=False).view(GpuBlock)
    ClientOutput(shared)[index] = block
    np.testing.assert_array_equal(out, block)
    shared.lease.end()
    out[:] = 0
    with pytest.raises(OSError, match="has ended: nothing more is written"):
        ClientOutput(shared)[index] = block
    assert not out.any()


def test_the_gpu_neither_reads_nor_writes_memory_of_another_byte_order(simulated: None, released: list[str]) -> None:
    array = filled((70, 300), pinned=False).astype(">f4")
    index = slice(3, 50), slice(7, 290)
    block = load(ClientArray.of(array), index, "cuda")
    assert block.dtype.isnative
    np.testing.assert_array_equal(block, array[index])
    for rows in (slice(0, 47), slice(0, 1)):
        out = np.zeros((70, 300), ">f4")
        ClientOutput(ClientArray.of(out))[rows, index[1]] = block[rows].view(GpuBlock)
        np.testing.assert_array_equal(out[rows, index[1]], block[rows])

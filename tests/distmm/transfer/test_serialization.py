"""bfloat16 blocks in GPU memory keep their type when Dask sends them to other workers and to the client."""

from __future__ import annotations

import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dask.utils import Dispatch
from distributed.protocol import deserialize, serialize

from distmm.transfer import gpu_allocations, loaded_blocks, serialization
from distmm.worker import neighbours


class Block:
    """Stands in for a CuPy array."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)


def dispatches() -> tuple[Dispatch, Dispatch]:
    """Send and receive as distributed.protocol.cupy does: by CUDA's array interface."""
    send, receive = Dispatch(), Dispatch()
    send.register(Block, lambda x: ({"typestr": x.dtype.str}, [b""]))
    receive.register(Block, lambda header, frames: Block(header["typestr"]))
    return send, receive


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.complex64])
def test_elements_keep_their_type(dtype: Any) -> None:
    send, receive = dispatches()
    for _ in range(2):
        serialization._replace(send, receive, Block, serialization._with_types)  # each product registers it again
    assert receive.dispatch(Block)(*send(Block(dtype))).dtype == dtype


def test_dask_alone_would_lose_the_type_of_bfloat16() -> None:
    send, receive = dispatches()
    assert receive.dispatch(Block)(*send(Block(ml_dtypes.bfloat16))).dtype == "V2"


def tables(monkeypatch: pytest.MonkeyPatch) -> list[Dispatch]:
    """Replace Dask's four serialization tables by ones that know `Block` only; return them."""
    found = [*dispatches(), *dispatches()]
    names = ["cuda_serialize", "cuda_deserialize", "dask_serialize", "dask_deserialize"]
    for name, dispatch in zip(names, found, strict=True):
        dispatch.register(np.ndarray, lambda *_: None)
        monkeypatch.setattr(serialization, name, dispatch)
    return found


def test_serialization_is_changed_at_once_if_dask_has_sent_cupy_blocks_already(monkeypatch: pytest.MonkeyPatch) -> None:
    send, receive, send_on_host, receive_on_host = tables(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Block))
    monkeypatch.setitem(sys.modules, "distributed.protocol.cupy", types.ModuleType("cupy"))
    serialization.register()
    for to, back in ((send, receive), (send_on_host, receive_on_host)):
        assert back.dispatch(Block)(*to(Block(ml_dtypes.bfloat16))).dtype == ml_dtypes.bfloat16


def test_blocks_for_clients_leave_gpus_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    send, *_ = tables(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Block))
    monkeypatch.setitem(sys.modules, "distributed.protocol.cupy", types.ModuleType("cupy"))
    serialization.register()
    block, other = Block("f4"), Block("f4")
    with serialization.through_host([block]):
        with pytest.raises(NotImplementedError):  # Dask then sends it by the function for host memory
            send(block)
        assert send(other) == ({"typestr": "<f4"}, [b""])
    assert send(block) == ({"typestr": "<f4"}, [b""])


def test_a_worker_receives_types_as_soon_as_it_has_said_that_it_reads_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = tables(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Block))
    monkeypatch.setitem(sys.modules, "distributed.protocol.cupy", types.ModuleType("cupy"))
    reads: list[bool] = [False, True]
    monkeypatch.setattr(neighbours.process_memory, "can_read", lambda *proof: True)
    monkeypatch.setattr(neighbours.gpu_allocations, "can_map", lambda *about: reads.pop(0))
    worker: Any = types.SimpleNamespace(plugins={"distmm-device"})
    allocation = gpu_allocations.Allocation(1, None, b"", 0, 0)
    for answer in (False, True):
        assert neighbours._reads("distmm-device", (0, 0, b""), (allocation, 0, b""), worker) is answer
        assert {dispatch.dispatch(Block).__module__ == "distmm.transfer.serialization" for dispatch in found} == {
            answer
        }


def test_serialization_is_otherwise_changed_when_the_first_block_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "distributed.protocol.cupy", raising=False)
    found = tables(monkeypatch)
    serialization.register()
    lazy = [dispatch._lazy["cupy"] for dispatch in found]
    assert lazy == [serialization._wrap] * 4


LAYOUTS = [
    np.arange(300, dtype="f4").reshape(20, 15), np.arange(300.0).reshape(20, 15).T, np.arange(3e3).reshape(50, 60)[::2],
    np.arange(300).astype(ml_dtypes.bfloat16), np.broadcast_to(np.arange(100.0), (7, 100)), np.zeros((0, 5)),
    np.array([None] * 100), np.arange(3),
]  # fmt: skip


@pytest.mark.parametrize("block", LAYOUTS, ids=lambda block: f"{block.shape} {block.dtype}")
def test_blocks_in_host_memory_arrive_with_their_checksum(block: np.ndarray) -> None:
    serialization.register()
    header, frames = serialize(block)
    assert serialization.SUM in header["sub-header"]
    there = deserialize(header, frames)
    np.testing.assert_array_equal(there, block)
    assert there.dtype == block.dtype


def test_a_block_that_was_changed_on_the_way_is_taken_for_a_message_that_was_cut_short() -> None:
    serialization.register()
    header, (frame,) = serialize(np.arange(300.0))
    changed = bytearray(frame)
    changed[1000] ^= 1
    with pytest.raises(EOFError, match=r"a block of 2400 bytes was changed on its way between two workers"):
        deserialize(header, [changed])


def test_the_checksum_of_the_load_travels_with_a_block() -> None:
    serialization.register()
    block = np.arange(300.0).reshape(20, 15)
    loaded_blocks.note(block)

    def sent() -> np.ndarray:
        header, (frame,) = serialize(block)
        return deserialize(header, [bytearray(frame)])

    early = sent()
    assert not loaded_blocks.has_changed(early)
    block[3, 4] = -1
    late = sent()
    assert [loaded_blocks.has_changed(one) for one in (block, late, early)] == [True, True, False]
    assert loaded_blocks.has_changed(late.T)  # a view of the same memory
    assert loaded_blocks.noted(late.copy()) is None


def test_what_was_noted_of_a_block_is_forgotten_with_its_memory() -> None:
    before = len(loaded_blocks._noted)
    block = np.arange(300.0)
    loaded_blocks.note(block)
    view = block.reshape(20, 15)
    del block
    assert loaded_blocks.noted(view) is not None
    del view
    assert len(loaded_blocks._noted) == before
    loaded_blocks.note(np.arange(3e3).reshape(50, 60)[:, ::2])  # with gaps: not known
    assert len(loaded_blocks._noted) == before


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["cuda", "dask"])
def test_gpu_blocks_keep_their_type(how: str) -> None:
    import cupy

    serialization.register()
    block = cupy.arange(12, dtype="f4").astype(ml_dtypes.bfloat16).reshape(3, 4)[:, ::2]
    there = deserialize(*serialize(block, serializers=[how]))
    assert there.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(there.get(), block.get())

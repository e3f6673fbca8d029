"""Blocks of GPU memory go to other processes of the host by name, all of a message together."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from distributed.protocol import deserialize, serialize

from distmm.transfer import ClientArray, gpu_allocations, process_memory, tickets
from distmm.worker import neighbours

ALLOCATION = gpu_allocations.Allocation(1, None, b"handle", 0, 1 << 40)

N = 600  # edge of a block that goes by a ticket


class OnGpu(np.ndarray):
    """Stands in for a CuPy array."""


class Generator:
    """Stands in for one of CuPy's other objects."""


OnGpu.__module__ = Generator.__module__ = "cupy"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate a GPU whose memory has handles; return what is waited for."""
    waited: list[str] = []
    stream = types.SimpleNamespace(synchronize=lambda: waited.append("default stream"))
    cuda = types.SimpleNamespace(Stream=types.SimpleNamespace(null=stream))
    module = types.SimpleNamespace(ndarray=OnGpu, cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(tickets.ClientArray, "of", of)
    return waited


def of(block: np.ndarray) -> ClientArray:
    where = "", 1, block.ctypes.data, block.shape, block.strides, block.dtype
    return ClientArray(*where, ALLOCATION, process_memory.proof())


def on_gpu(*shape: int) -> OnGpu:
    return np.ones(shape, "f4").view(OnGpu)


def test_large_blocks_without_gaps_go_by_name(gpu: list[str]) -> None:
    large, small, gaps = on_gpu(N, N), on_gpu(9, N), on_gpu(N, 2 * N)[:, ::2]
    slow = {"backwards": large[::-1], "repeated": np.broadcast_to(on_gpu(1, N), (N, N), subok=True)}
    host = {"host": np.ones((N, N), "f4"), "other": Generator()}
    found = tickets.tickets_for({"large": large, "small": small, "gaps": gaps, **slow, **host})
    assert found is not None
    assert list(found.named) == ["large"]
    assert list(found.others) == ["small", "gaps", *slow, "host", "other"]
    assert found.named["large"].mark[1]  # the receiver sees whether it was freed
    assert gpu == ["default stream"]  # once for all blocks
    assert tickets.tickets_for({"small": small, **host}) is None


def test_what_dask_cannot_send_is_refused_as_dask_refuses_it(gpu: list[str]) -> None:
    tickets.take(lambda named: ["copy"] * len(named))
    lock = threading.Lock()  # pickle refuses it
    sent = serialize(tickets.tickets_for({"large": on_gpu(N, N), "lock": lock}))
    with pytest.raises(TypeError, match="Could not serialize"):
        deserialize(*sent)


def test_memory_without_a_handle_gets_no_ticket(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tickets._warn.cache_clear()
    monkeypatch.setattr(ClientArray, "on_gpu", False)
    for _ in range(2):
        assert tickets.tickets_for({"block": on_gpu(N, N)}) is None
    assert caplog.text.count("rmm_pool_size") == 1


def test_named_blocks_and_others_arrive_as_one_dict(gpu: list[str]) -> None:
    copied: list[int] = []

    def copies(named: Sequence[ClientArray]) -> list[Any]:
        copied.append(len(named))
        return [f"copy of {each.shape}" for each in named]

    tickets.take(copies)
    blocks = {("c", 0, 1): on_gpu(N, N), ("c", 1, 0): np.arange(3), "d": on_gpu(2, N, N), "e": "text"}
    arrived = deserialize(*serialize(tickets.tickets_for(blocks), on_error="raise"))
    np.testing.assert_array_equal(arrived.pop(("c", 1, 0)), np.arange(3))
    assert arrived == {("c", 0, 1): f"copy of ({N}, {N})", "d": f"copy of (2, {N}, {N})", "e": "text"}
    assert copied == [2]  # together


def test_a_worker_that_could_not_map_a_block_asks_for_its_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(named: Any) -> None:
        raise OSError("resource already mapped")

    monkeypatch.setattr(neighbours.gpu_copies, "copies", refused)
    monkeypatch.setattr(neighbours, "_unreachable", set())
    monkeypatch.setattr(neighbours.process_memory, "can_read", lambda *proof: True)
    monkeypatch.setattr(neighbours.gpu_allocations, "can_map", lambda *about: True)
    monkeypatch.setattr(neighbours.serialization, "register", lambda: None)
    monkeypatch.setitem(sys.modules, "distributed.protocol.cupy", types.ModuleType("cupy"))
    worker: Any = types.SimpleNamespace(plugins={"distmm-device"})
    theirs, others = (gpu_allocations.Allocation(pid, None, b"", 0, 0) for pid in (1, 2))

    def answers() -> list[bool | None]:
        return [neighbours._reads("distmm-device", (0, 0, b""), (of, 0, b""), worker) for of in (theirs, others)]

    assert answers() == [True, True]
    with pytest.raises(EOFError, match="already mapped"):
        neighbours.received([ClientArray("", 1, 0, (2, 2), (8, 4), np.dtype("f4"), theirs, (1, 0, b""))])
    assert answers() == [False, True]

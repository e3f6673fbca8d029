"""Memory of freed blocks: when it is used again, and when it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm.clusters import view
from distmm.transfer import block_memory
from distmm.transfer.block_memory import BlockMemory
from distmm.worker.tasks import products
from distmm.worker.tasks.epilogue import Epilogue
from distmm.worker.tasks.kernel_choice import KernelChoice
from distmm.worker.tasks.probe import probe

F4 = np.dtype("f4")
SHAPE = 1024, 2048  # 8 MB


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> BlockMemory:
    blocks = BlockMemory()
    blocks.reuses = True
    monkeypatch.setattr(block_memory, "blocks", blocks)
    return blocks


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The bytes of each piece of memory that is not freed."""
    made: list[weakref.ref[Any]] = []

    def new(nbytes: int, real: Callable[[int], Any] = block_memory._new) -> Any:
        memory = real(nbytes)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(block_memory, "_new", new)
    return lambda: [memory.nbytes for one in made if (memory := one()) is not None]


def address(block: np.ndarray) -> int:
    return block.ctypes.data


@pytest.mark.parametrize("rows", [SHAPE[0], SHAPE[0] - 1])
def test_a_new_block_is_in_the_memory_of_one_that_no_array_uses_any_more(blocks: BlockMemory, rows: int) -> None:
    first = blocks.new((rows, SHAPE[1]), F4)
    before, view = address(first), first.reshape(-1)[5:].view("i4")[::3].T
    del first
    second = blocks.new((rows, SHAPE[1]), F4)
    assert abs(address(second) - before) >= second.nbytes  # the view uses the memory
    del view
    third = blocks.new((SHAPE[1], rows), np.dtype("i4"))
    assert address(third) == before
    assert third.shape == (SHAPE[1], rows)
    assert third.flags.c_contiguous
    assert third.flags.writeable


def test_a_block_of_another_size_frees_what_is_kept(blocks: BlockMemory, kept: Callable[[], list[int]]) -> None:
    held = [blocks.new(SHAPE, F4) for _ in range(3)]
    del held
    assert len(kept()) == 3
    other = blocks.new((2 * SHAPE[0], SHAPE[1]), F4)
    assert kept() == [other.nbytes]


def test_memory_is_freed_when_no_block_has_been_made_for_a_while(
    blocks: BlockMemory, kept: Callable[[], list[int]]
) -> None:
    blocks.new(SHAPE, F4)
    blocks.drop_idle()
    assert kept()
    blocks.drop_idle()
    assert not kept()
    block = blocks.new(SHAPE, F4)
    blocks.drop_idle()
    blocks.drop_idle()
    assert kept() == [block.nbytes]  # it is in use


def test_without_reuse_memory_is_freed_with_its_block() -> None:
    block = BlockMemory().new(SHAPE, F4)
    assert block.base is not None
    memory = weakref.ref(block.base)
    del block
    assert memory() is None


def test_products_on_cpus_are_in_the_memory_of_freed_ones(blocks: BlockMemory, kept: Callable[[], list[int]]) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((SHAPE[0], 32)).astype(F4), rng.standard_normal((32, SHAPE[1])).astype(F4)
    c = None
    for step in range(5):
        epilogue = Epilogue(F4, "numpy") if step == 4 else None
        c = products.multiply(None, KernelChoice("cpu", F4), c, [a, a], [b, b], epilogue)
    assert len(kept()) == 3  # of the sum before, and of those of the first and the second panel
    before = address(c)
    np.testing.assert_allclose(c, 10 * (a @ b), rtol=1e-4, atol=1e-4)
    del c
    assert address(blocks.new(SHAPE, F4)) == before


def test_a_worker_keeps_no_memory_when_it_is_asked_how_much_is_free(
    blocks: BlockMemory, kept: Callable[[], list[int]]
) -> None:
    blocks.new(SHAPE, F4)
    assert kept()
    manager = SimpleNamespace(memory_limit=None, memory_pause_fraction=0.8)
    worker: Any = SimpleNamespace(state=SimpleNamespace(nthreads=1), memory_manager=manager)
    probe("none", F4, "highest", None, False, worker)
    assert not kept()


def test_a_process_keeps_no_memory_when_its_worker_has_ended(
    cluster: Callable[[int], Client], kept: Callable[[], list[int]]
) -> None:
    client = cluster(1)
    view.ask(client, None)
    assert block_memory.blocks.reuses
    block = block_memory.blocks.new(SHAPE, F4)
    client.cluster.close()
    del block
    assert not block_memory.blocks.reuses
    assert not kept()


def _made_twice() -> bool:
    first = address(block_memory.blocks.new(SHAPE, F4))
    return address(block_memory.blocks.new(SHAPE, F4)) == first and block_memory.blocks.reuses


def test_workers_without_a_gpu_use_memory_again(client: Client) -> None:
    view.ask(client, None)
    assert all(client.run(_made_twice).values())
    assert not block_memory.blocks.reuses  # on the client

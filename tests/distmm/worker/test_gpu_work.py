"""Work on a GPU: operands are prepared once, a full GPU is tried again, and streams wait for each other."""

from __future__ import annotations

import gc
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm.clusters import view
from distmm.errors import DeviceMemoryError
from distmm.worker import gpu, plugin, prepared_operands
from distmm.worker.prepared_operands import Prepared
from distmm.worker.united_chunks import Union


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setattr(prepared_operands, "alias", np.array)
    return Prepared()


@pytest.mark.minutes
def test_a_block_is_prepared_once_for_each_form_and_forgotten_with_it(prepared: Prepared) -> None:
    made: list[int] = []

    def split(block: np.ndarray) -> list[np.ndarray]:
        made.append(id(block))
        return [block.astype("f2"), block - block.astype("f2")]

    block, other = np.ones((4, 4)), np.zeros((4, 4))
    first = prepared.get(block, "A", split)
    assert prepared.get(block, "A", split) is first
    assert prepared.get(other, "A", split) is not first
    assert prepared.get(block, "B", split) is not first
    assert len(made) == 3
    del block
    gc.collect()
    assert len(prepared) == 1
    del other
    gc.collect()
    assert len(prepared) == 0


def test_the_least_recently_used_operand_makes_room_for_others(prepared: Prepared) -> None:
    made: list[int] = []
    blocks = [np.full((2, 3), i) for i in range(4)]

    def use(i: int, most: float) -> list[int]:
        prepared.get(blocks[i], "A", lambda alias: made.append(i) or alias.copy(), most)
        now, made[:] = list(made), []
        return now

    assert [use(i, 18) for i in (0, 1, 2, 0)] == [[0], [1], [2], []]
    assert use(3, 18) == [3]  # it replaces 1, because 0 was used after 1
    assert [use(i, 18) for i in (2, 0, 3)] == [[], [], []]
    assert use(1, 1) == [1]  # larger than the limit: it is kept alone
    assert len(prepared) == 1


def test_products_that_begin_side_by_side_prepare_a_block_once(prepared: Prepared) -> None:
    block, made = np.ones((2, 3)), []
    together = threading.Barrier(3)

    def slowly(alias: np.ndarray) -> np.ndarray:
        made.append(alias)
        time.sleep(0.05)  # meanwhile the others ask too
        return alias.copy()

    def use(_: int) -> np.ndarray:
        together.wait(60)
        return prepared.get(block, "A", slowly)

    with ThreadPoolExecutor(3) as pool:
        operands = list(pool.map(use, range(3)))
    assert len(made) == 1
    assert all(operand is operands[0] for operand in operands)


def test_an_operand_that_uses_the_memory_of_a_block_does_not_keep_the_block(
    prepared: Prepared,
) -> None:
    block = np.ones((4, 4))
    operand = prepared.get(block, "A", lambda alias: alias)
    assert operand is not block
    assert prepared.get(block, "A", lambda alias: alias) is operand
    del block
    gc.collect()
    assert len(prepared) == 0


class OnGpu:
    """A block in GPU memory, as far as `Prepared` looks at it."""

    size, dtype = 12, np.dtype("f4")

    def __init__(self, base: OnGpu | None, shape: tuple[int, int], strides: tuple[int, int], ptr: int = 4096) -> None:
        self.base, self.shape, self.strides = base, shape, strides
        self.data = types.SimpleNamespace(ptr=ptr)

    def turned(self) -> OnGpu:
        """Return a new transposed view, as a task makes one of the block that it receives."""
        return OnGpu(self, self.shape[::-1], self.strides[::-1])


def test_views_that_tasks_make_of_a_block_share_what_is_prepared(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_operands, "alias", lambda block: (block.shape, block.strides))
    monkeypatch.setattr(prepared_operands, "in_task", lambda: True)
    block, other = (OnGpu(None, (3, 4), (16, 4)) for _ in range(2))
    made: list[Any] = []

    def prepare(layout: Any) -> Any:
        made.append(layout)
        return [layout]

    first = prepared.get(block.turned(), "A", prepare)
    assert prepared.get(block.turned(), "A", prepare) is first  # the first view is garbage by now
    assert prepared.get(block.turned(), "B", prepare) is not first
    assert prepared.get(block, "A", prepare) is not first
    assert prepared.get(OnGpu(block, (4, 3), (12, 4)), "A", prepare) is not first  # the same memory in another layout
    assert prepared.get(other.turned(), "A", prepare) is not first
    part = OnGpu(block, (3, 2), (16, 4))
    part.size = 6
    assert prepared.get(part, "A", prepare) is not first
    assert (len(made), len(prepared)) == (6, 6)
    del part
    gc.collect()
    assert len(prepared) == 5  # a part of a block is prepared as long as it exists itself
    del block
    gc.collect()
    assert len(prepared) == 1


def test_a_block_in_several_chunks_is_joined_and_prepared_once(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_operands, "alias", Union.joined)
    chunks = [np.full((2, 3), i) for i in range(4)]

    def use(*lines: list[int], most: float = 48) -> np.ndarray:
        edges = (2,) * len(lines), (3,) * len(lines[0])
        made: np.ndarray = prepared.get(Union(edges, [chunks[i] for line in lines for i in line]), "A", np.copy, most)
        return made

    square = use([0, 1], [2, 3])
    np.testing.assert_array_equal(square, np.block([[chunks[0], chunks[1]], [chunks[2], chunks[3]]]))
    assert use([0, 1], [2, 3]) is square
    assert use([0, 1, 2, 3]).shape == (2, 12)  # the same chunks in another order
    assert use([0], [1], [2], [3]).shape == (8, 3)  # there is room for two blocks of 24 elements
    assert len(prepared) == 2
    chunks[3] = chunks[2]
    gc.collect()
    assert len(prepared) == 0  # a chunk has gone


def test_views_of_the_callers_array_share_nothing(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a worker's tasks: the caller may have written to his array since the last product."""
    monkeypatch.setattr(prepared_operands, "alias", lambda block: block.shape)
    array = OnGpu(None, (3, 4), (16, 4))
    first = prepared.get(array.turned(), "A", lambda shape: [shape])
    assert prepared.get(array.turned(), "A", lambda shape: [shape]) is not first


def test_operands_are_dropped_when_products_have_stopped(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    block = np.ones((4, 4))
    prepared.get(block, "A", np.array)
    prepared.drop_idle()
    assert len(prepared) == 1
    monkeypatch.setattr(prepared_operands, "IDLE_SECONDS", -1.0)
    prepared.drop_idle()
    assert len(prepared) == 0


def test_a_full_gpu_is_tried_again_after_freeing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(prepared_operands, "prepared", Prepared())  # without what other tests have left
    attempts: list[int] = []

    def full_at_first() -> str:
        attempts.append(len(prepared_operands.prepared))
        if len(attempts) < 3:
            raise MemoryError("out of memory")
        return "done"

    block = np.ones(3)
    with monkeypatch.context() as patch:
        patch.setattr(prepared_operands, "alias", np.array)
        prepared_operands.prepared.get(block, "A", lambda x: x + 1)
    assert gpu.retrying(full_at_first, "a block") == "done"
    assert attempts == [1, 0, 0]


def test_a_gpu_that_stays_full_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PAUSES", (0.0,))

    def full() -> None:
        raise MemoryError("std::bad_alloc: 8 GB")

    with pytest.raises(DeviceMemoryError, match=r"a block of C found no room \(std::bad_alloc: 8 GB\).*Use smaller"):
        gpu.retrying(full, "a block of C")


def test_every_worker_gets_the_plugin_and_what_it_started_ends_with_it(cluster: Callable[[int], Client]) -> None:
    client = cluster(2)
    view.ask(client)
    view.ask(client)

    def started(dask_worker: Any) -> bool:
        return plugin.DevicePlugin.name in dask_worker.plugins and "distmm-free" in dask_worker.periodic_callbacks

    assert all(client.run(started).values())
    client.unregister_worker_plugin(plugin.DevicePlugin.name)
    assert not any(client.run(started).values())
    view.ask(client)


@pytest.mark.gpu
def test_work_on_a_stream_is_complete_at_the_end_of_the_block() -> None:
    import cupy

    with gpu.working("product") as stream:
        assert cupy.cuda.get_current_stream() == stream
        x = cupy.random.default_rng(0).standard_normal((4096, 4096), dtype="f4")
        y = x @ x
    assert stream.done
    assert cupy.cuda.get_current_stream() == cupy.cuda.Stream.null
    assert bool(cupy.isfinite(y).all())


@pytest.mark.gpu
def test_work_follows_what_was_put_on_the_default_stream() -> None:
    import cupy

    x = cupy.zeros((8192, 8192), "f4")
    cupy.cuda.Device().synchronize()
    for _ in range(20):  # 20 passes over 256 MB are still running when the product's stream starts
        x += 1
    with gpu.working("product"):
        y = x.max()
    assert float(y) == 20


@pytest.mark.gpu
def test_work_follows_that_of_an_enclosing_block_on_another_stream() -> None:
    import cupy

    x = cupy.zeros((8192, 8192), "f4")
    with gpu.working("product"):
        for _ in range(20):
            x += 1
        with gpu.working("download"):
            y = x.max()
    assert float(y) == 20


@pytest.mark.gpu
def test_memory_that_the_default_stream_still_reads_is_not_written() -> None:
    """A task of another thread may let go of a block before the kernels that it has enqueued have read the block."""
    import cupy

    busy = cupy.zeros((8192, 8192), "f4")
    busy += 1
    float(busy.sum())  # kernels are loaded: to load one waits for the GPU
    with gpu.working("product"):
        block = cupy.ones((4096, 4096), "f4")
    with gpu.working("product"):
        place = block.data.ptr
        with cupy.cuda.Stream.null:  # as a task of another thread
            for _ in range(200):
                busy += 1
            total = block.sum()
        del block
        taken = cupy.zeros((4096, 4096), "f4")
        assert taken.data.ptr == place
    assert float(total) == 4096 * 4096


def test_work_waits_for_the_default_stream_and_for_that_of_the_enclosing_block(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self) -> None:
            self.awaited: list[Stream] = []

        def __enter__(self) -> None:
            current.append(self)

        def __exit__(self, *error: object) -> None:
            current.pop()

        def wait_event(self, event: Event) -> None:
            self.awaited.append(event.of)

    class Event:
        of: Stream

        def __init__(self, **how: bool) -> None:
            """Take the options of CuPy's event."""

        def record(self, stream: Stream) -> None:
            self.of = stream

        def synchronize(self) -> None:
            """Do nothing: no work takes time."""

    Stream.null = Stream()  # type: ignore[attr-defined]
    current, streams = [Stream.null], {"product": Stream(), "download": Stream()}  # type: ignore[attr-defined]
    runtime = types.SimpleNamespace(getDevice=lambda: 0)

    @contextmanager
    def using_allocator(allocator: Callable[[int], object]) -> Iterator[None]:
        allocators.append(allocator)
        yield
        allocators.pop()

    allocators: list[Callable[[int], object]] = [bytes]
    cuda = types.SimpleNamespace(
        Stream=Stream,
        Event=Event,
        runtime=runtime,
        get_current_stream=lambda: current[-1],
        get_allocator=lambda: allocators[-1],
        using_allocator=using_allocator,
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gpu, "_stream", lambda work, device: streams[work])
    with gpu.working("product") as outer, gpu.working("download") as inner:
        assert {id(each) for each in inner.awaited} == {id(current[0]), id(outer)}
        inner.awaited.clear()
        assert allocators[-1](3) == bytes(3)
        assert inner.awaited == [current[0]]


@pytest.mark.gpu
def test_a_full_gpu_fails_one_task_and_not_the_next() -> None:
    import cupy

    free, _ = cupy.cuda.Device().mem_info
    with pytest.raises(DeviceMemoryError, match="a test found no room"):
        gpu.retrying(lambda: cupy.empty(4 * free, "u1"), "a test")
    assert int(gpu.retrying(lambda: cupy.ones(1000, "i4").sum(), "a test")) == 1000

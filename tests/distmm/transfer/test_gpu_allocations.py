"""GPU memory of other processes: mapped once, kept while copies use it, closed afterwards."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distmm.errors import InputError
from distmm.pid import start_time
from distmm.transfer import ClientArray, gpu_allocations
from distmm.transfer.gpu_allocations import Allocation

PARENT = os.getppid()
THEIRS = Allocation(PARENT, start_time(PARENT), b"handle", 4096, 100)


class CUDARuntimeError(Exception):
    status = 1


class Runtime(types.ModuleType):
    """Simulates CUDA's functions for handles: maps have addresses, and a handle may be refused."""

    def __init__(self) -> None:
        super().__init__("cupy.cuda.runtime")
        self.opened: list[bytes] = []
        self.closed: list[int] = []
        self.refused: set[bytes] = set()
        self.in_the_way: dict[bytes, int] = {}
        self.CUDARuntimeError = CUDARuntimeError

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:  # noqa: N802
        """Map an allocation."""
        if handle in self.refused:
            raise CUDARuntimeError("invalid device context")
        if self.in_the_way.get(handle, 0) not in (0, *self.closed):
            error = CUDARuntimeError("resource already mapped")
            error.status = 208
            raise error
        self.opened.append(handle)
        return 1000 * len(self.opened)

    def ipcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        """Unmap it."""
        self.closed.append(address)

    def getDevice(self) -> int:  # noqa: N802
        """Return the current GPU."""
        return 0

    def setDevice(self, device: int) -> None:  # noqa: N802
        """Select a GPU."""

    def deviceSynchronize(self) -> None:  # noqa: N802
        """Wait for nothing."""


class AtOnce:
    """A thread that runs its function when it is started, and ends."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], **how: Any) -> None:
        self.start = lambda: target(*args)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    cuda = types.ModuleType("cupy.cuda")
    cuda.runtime = made  # type: ignore[attr-defined]
    for name, module in {"cupy": types.ModuleType("cupy"), "cupy.cuda": cuda}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gpu_allocations, "_maps", {})
    monkeypatch.setattr(gpu_allocations.threading, "Thread", AtOnce)
    return made


def test_an_allocation_is_mapped_once_and_closed_when_no_copy_uses_it(runtime: Runtime) -> None:
    with gpu_allocations.mapped(THEIRS) as first, gpu_allocations.mapped(replace(THEIRS)) as second:
        assert first == second == 1000
        gpu_allocations.drop_idle(seconds=-1)
        assert not runtime.closed
    gpu_allocations.drop_idle(seconds=60)
    assert not runtime.closed
    gpu_allocations.drop_idle(seconds=-1)
    assert runtime.closed == [1000]
    with gpu_allocations.mapped(THEIRS) as again:
        assert again == 2000


def test_a_map_that_took_long_to_open_is_kept_longer(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # each look at it comes a second later, so a map takes a second to open
    monkeypatch.setattr(gpu_allocations.time, "monotonic", lambda: float(next(clock)))
    with gpu_allocations.mapped(THEIRS):
        pass
    for _ in range(int(gpu_allocations.IDLE_SECONDS) + 1):
        gpu_allocations.drop_idle()
    assert not runtime.closed
    for _ in range(int(gpu_allocations.IDLE_SECONDS / gpu_allocations.OPENING_SECONDS)):
        gpu_allocations.drop_idle()
    assert runtime.closed == [1000]


def test_a_map_of_a_process_that_has_ended_is_closed(runtime: Runtime) -> None:
    with gpu_allocations.mapped(THEIRS), gpu_allocations.mapped(replace(THEIRS, started="5")):
        pass
    gpu_allocations.drop_idle(seconds=60)
    assert runtime.closed == [2000]


def test_memory_that_a_process_got_at_the_same_address_is_another_allocation(runtime: Runtime) -> None:
    for other in (replace(THEIRS, handle=b"later"), replace(THEIRS, started="6")):
        with gpu_allocations.mapped(THEIRS) as first, gpu_allocations.mapped(other) as second:
            assert first != second


def test_memory_that_its_owner_has_freed_and_allocated_again_is_mapped_when_the_earlier_map_is_closed(
    runtime: Runtime,
) -> None:
    again = replace(THEIRS, handle=b"again")
    with gpu_allocations.mapped(THEIRS) as first:
        pass
    runtime.in_the_way[again.handle] = first
    with gpu_allocations.mapped(again) as second:
        assert runtime.closed == [first]
        assert second == 2000


def test_a_map_waits_for_copies_from_the_freed_memory(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # real threads
    for name in ("cupy", "cupy.cuda"):
        module = types.ModuleType(name)
        module.runtime = runtime  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gpu_allocations, "_maps", {})
    again = replace(THEIRS, handle=b"again")
    mapped: list[int] = []

    def map_again() -> None:
        with gpu_allocations.mapped(again) as address:
            mapped.append(address)

    with gpu_allocations.mapped(THEIRS) as first:
        runtime.in_the_way[again.handle] = first
        threads = [threading.Thread(target=map_again) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert not mapped
        assert not runtime.closed
    for thread in threads:
        thread.join()
    assert mapped == [2000, 2000]
    assert runtime.closed == [first]
    assert len(runtime.opened) == 2


def test_an_owner_that_has_ended_is_named(runtime: Runtime) -> None:
    runtime.refused.add(THEIRS.handle)
    with (
        pytest.raises(OSError, match=rf"process {PARENT} is out of reach.*has it ended"),
        gpu_allocations.mapped(THEIRS),
    ):
        pass


def test_a_process_uses_its_own_memory_without_a_map(runtime: Runtime) -> None:
    ours = Allocation(os.getpid(), start_time(os.getpid()), b"handle", 4096, 100)
    with gpu_allocations.mapped(pickle.loads(pickle.dumps(ours))) as address:
        assert address == 4096
    assert not runtime.opened


STACK = np.arange(60.0).reshape(3, 4, 5)


@pytest.mark.parametrize(
    "box",
    [
        STACK.reshape(3, 4, 5, 1)[::-1],
        STACK[::-1, :1],
        np.broadcast_to(STACK[0], (3, 4, 5))[:, 1:2],
        np.broadcast_to(STACK[0], (3, 4, 5)),
        STACK[:, ::2],
    ],
    ids=["columns in stacks from the last", "one row of each", "one row of repeated ones", "repeated ones", "rows"],
)
def test_a_gpu_copies_rows_that_are_apart_and_in_ascending_order(box: Any) -> None:
    """The strides of a matrix in GPU memory are pitches of CUDA's copies."""
    here = ClientArray.of(box)
    few = replace(here, segment=Allocation(os.getpid(), None, b"", here.address, here.nbytes)).merged()
    *_, rows, width = few.shape
    assert rows == 1 or width * few.dtype.itemsize <= few.strides[-2]
    memory = np.lib.stride_tricks.as_strided(box[(slice(0, 1),) * box.ndim], few.shape, few.strides)
    np.testing.assert_array_equal(memory.ravel(), box.ravel())


VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda a: a[5:600, 17:500],
    "transpose": lambda a: a.T,
    "rows from the last": lambda a: a[::-1],
    "every second row and column": lambda a: a[::2, ::2],
    "stack": lambda a: a[:, :512].reshape(4, 200, 512)[::-1].swapaxes(1, 2),
}


def lend(kind: str, ready: Any, done: Any) -> None:
    """Lend arrays of this process to another one."""
    import cupy

    if kind == "async":
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    from distmm.transfer import lending

    array = cupy.arange(800 * 700, dtype="f4").reshape(800, 700)
    lent = {name: lending._lendable(view(array), False) for name, view in VIEWS.items()}
    ready.put({name: pickle.dumps(ClientArray.of(x, name)) for name, x in lent.items()})
    done.get(timeout=100)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["pool", "async"])
def test_a_gpu_reads_arrays_of_another_process_until_that_ends(kind: str) -> None:
    from distmm.worker import gpu_copies

    context = multiprocessing.get_context("spawn")
    ready, done = context.Queue(), context.Queue()
    lender = context.Process(target=lend, args=(kind, ready, done))
    lender.start()
    array = np.arange(800 * 700, dtype="f4").reshape(800, 700)
    lent = {name: pickle.loads(one) for name, one in ready.get(timeout=100).items()}
    for name, one in lent.items():
        part = tuple(slice(n // 3, n - 1) for n in one.shape)
        np.testing.assert_array_equal(gpu_copies.upload(one.part(part)).get(), VIEWS[name](array)[part])
    done.put(None)
    lender.join()
    with pytest.raises((OSError, InputError), match=f"process {lender.pid} is out of reach"):
        gpu_copies.upload(one.part(part))


@pytest.mark.gpu
def test_a_gpu_writes_only_the_part_that_it_was_given() -> None:
    import cupy

    from distmm.worker.client_output import ClientOutput

    out = cupy.zeros((300, 400), "f4").T
    ClientOutput(ClientArray.of(out))[slice(3, 100), slice(5, 250)] = cupy.ones((97, 245), "f4")
    ClientOutput(ClientArray.of(out))[slice(200, 210), slice(0, 300)] = np.full((10, 300), 2, "f4")
    expected = np.zeros((400, 300), "f4")
    expected[3:100, 5:250], expected[200:210] = 1, 2
    np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.gpu
def test_a_thread_that_has_used_no_gpu_finds_the_handle_of_an_array() -> None:
    import cupy

    array = cupy.zeros((300, 400), "f4")
    found: list[Allocation | None] = []
    thread = threading.Thread(target=lambda: found.append(gpu_allocations.behind(array)))
    thread.start()
    thread.join()
    assert found == [gpu_allocations.behind(array)]
    assert found[0] is not None


@pytest.mark.gpu
def test_memory_that_another_process_allocates_again_is_read() -> None:
    from distmm.worker import gpu_copies

    context = multiprocessing.get_context("spawn")
    made, read = context.Queue(), context.Queue()
    lender = context.Process(target=allocate_again, args=(made, read))
    lender.start()
    for value in range(20):
        given = pickle.loads(made.get(timeout=100))
        assert (gpu_copies.upload(given).get() == value).all()
        read.put(None)
    lender.join()


def allocate_again(made: Any, read: Any) -> None:
    """Lend twenty arrays without a pool, and free each when it has been read."""
    import cupy

    cupy.cuda.set_allocator(None)
    for value in range(20):
        array = cupy.full((700 + 100 * (value % 3), 800), value, "f4")
        cupy.cuda.get_current_stream().synchronize()
        made.put(pickle.dumps(ClientArray.of(array)))
        read.get(timeout=100)
        del array

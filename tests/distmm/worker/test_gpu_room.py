"""A GPU whose memory is full: what says so, what is freed, and that the task is tried again alone."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from distmm.errors import DeviceMemoryError
from distmm.worker import gpu, gpu_room, prepared_operands
from distmm.worker.tasks import products
from distmm.worker.tasks.kernel_choice import KernelChoice
from tests.tables import later

SECONDS = 120  # for what takes no time


class CUDARuntimeError(RuntimeError):
    """As CuPy's, by its text."""


class CudaAPIError(Exception):
    """As Numba's, by its text."""


FULL = [
    MemoryError("std::bad_alloc: out_of_memory: RMM failure"),
    CUDARuntimeError("cudaErrorMemoryAllocation: out of memory"),
    CudaAPIError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("the CUDA driver answers CUDA_ERROR_OUT_OF_MEMORY: out of memory"),  # a launch of distmm_kernels
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU of 80 GB with 3 GB free, whose pools note that they are emptied; no pauses."""
    freed: list[str] = []

    def pool(name: str) -> Callable[[], Any]:
        return lambda: types.SimpleNamespace(free_all_blocks=lambda: freed.append(name))

    runtime = types.SimpleNamespace(memGetInfo=lambda: (3 * 10**9, 80 * 10**9))
    fake = types.SimpleNamespace(
        get_default_memory_pool=pool("device"), get_default_pinned_memory_pool=pool("pinned"),
        cuda=types.SimpleNamespace(runtime=runtime),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(gpu_room, "pool_bytes", lambda: 64 * 10**9)
    monkeypatch.setattr(gpu, "PAUSES", (0.0, 0.0))
    return freed


@pytest.mark.parametrize("error", later(FULL))
def test_pools_are_emptied_before_another_try(error: Exception, cupy: list[str]) -> None:
    left = [error, error]

    def work() -> str:
        if left:
            raise left.pop()
        return "made"

    assert gpu.retrying(work, "a block") == "made"
    assert cupy == ["device", "pinned"] * 2


@pytest.mark.parametrize("error", [RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"), ValueError("shapes differ")])
@pytest.mark.parametrize("later", [False, True])
def test_other_errors_are_not_tried_again(error: Exception, later: bool, cupy: list[str]) -> None:
    raised = [error, *[MemoryError()] * later]

    def work() -> None:
        raise raised.pop()

    with pytest.raises(type(error), match=str(error)):
        gpu.retrying(work, "a block")
    assert not raised


@pytest.mark.minutes
def test_memory_that_stays_full_is_reported_with_figures_and_the_remedy(cupy: list[str]) -> None:
    def work() -> None:
        raise FULL[1]

    with pytest.raises(DeviceMemoryError) as raised:
        gpu.retrying(work, "a block of C", needs=5 * 10**9, peak=60 * 10**9)
    for part in (
        "a block of C found no room (cudaErrorMemoryAllocation", "it needs 5 GB", "the plan expects 60 GB on a worker",
        "the GPU has 80 GB, 64 GB of it in this worker's pool; outside of pools 3 GB are free", "Use smaller blocks",
    ):  # fmt: skip
        assert part in str(raised.value)


def test_what_found_no_room_is_tried_again_while_nothing_else_works_on_the_gpu(
    cupy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three threads work on and on; a fourth finds no room while any of them does."""
    turns = gpu_room.Turns()
    monkeypatch.setattr(gpu, "_turns", turns)
    working: list[int] = []
    begun, over = threading.Barrier(4), threading.Event()

    def on_and_on(number: int) -> int:
        rounds = 0
        while not over.is_set():
            with turns.turn():
                working.append(number)
                if not rounds:
                    begun.wait(SECONDS)
                working.remove(number)
            rounds += 1
        return rounds

    tries: list[int] = []

    def work() -> str:
        tries.append(len(working))
        with turns.turn():  # as `gpu.working` does: within its own turn
            if len(tries) == 1 or working:
                raise MemoryError("full")
        return "made"

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(on_and_on, number) for number in range(3)]
        begun.wait(SECONDS)
        try:
            assert gpu.retrying(work, "a block") == "made"
        finally:
            over.set()
        assert all(other.result(SECONDS) for other in others)
    assert len(tries) == 2


def test_two_threads_that_find_no_room_take_turns(cupy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    turns = gpu_room.Turns()
    monkeypatch.setattr(gpu, "_turns", turns)
    both, alone = threading.Barrier(2), []

    def work(first: list[bool]) -> bool:
        with turns.turn():
            if first:
                first.pop()
                both.wait(SECONDS)  # each has begun beside the other
                raise MemoryError("full")
            alone.append(1)
            found = len(alone)
            alone.pop()
            return found == 1

    with ThreadPoolExecutor(2) as pool:
        assert (
            list(pool.map(lambda _: gpu.retrying(lambda first=[True]: work(first), "a block"), range(2))) == [True] * 2
        )


def test_a_thread_that_works_beside_others_does_not_wait_to_be_alone(cupy: list[str]) -> None:
    """It would wait for itself."""
    left = [MemoryError()]

    def work() -> str:
        if left:
            raise left.pop()
        return "made"

    with gpu._turns.turn():
        assert gpu.retrying(work, "a block") == "made"


# Tasks, with a kernel that finds no room at first


class FullOnce:
    """A kernel on a "GPU" of host memory, without room for the first product."""

    name, dtype, accumulator = "full", np.dtype("f4"), np.dtype("f4")

    def __init__(self) -> None:
        self.tries = 0

    def prepare_a(self, block: Any, wait: bool = True) -> Any:
        return block

    prepare_b = prepare_a

    def joined(self, operands: list[Any]) -> list[Any]:
        return operands

    def multiply(self, a: Any, b: Any, c: Any, **how: Any) -> Any:
        self.tries += 1
        if self.tries == 1:
            raise RuntimeError("the CUDA driver answers CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        return a @ b if c is None else c + a @ b


def test_a_product_is_made_again_from_the_same_sum(cupy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FullOnce()
    monkeypatch.setattr(products, "kernel_for", lambda *_: kernel)
    monkeypatch.setattr(gpu, "working", lambda work: nullcontext())
    monkeypatch.setattr(prepared_operands, "prepared", prepared_operands.Prepared())
    monkeypatch.setattr(prepared_operands, "alias", lambda block: block)
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal((8, 8), dtype="f4") for _ in range(3))
    before = c.copy()
    made = products.multiply(None, KernelChoice("cuda", np.dtype("f4")), c, [a], [b])
    np.testing.assert_array_equal(made, c + a @ b)
    np.testing.assert_array_equal(c, before)
    assert kernel.tries == 2
    assert cupy == ["device", "pinned"]


# On a real GPU


@contextmanager
def all_but(room: int) -> Iterator[Callable[[], None]]:
    """Take the GPU's memory away but for `room` bytes; yield what gives it back."""
    import cupy

    prepared_operands.prepared.clear()
    cupy.get_default_memory_pool().free_all_blocks()
    free, _ = cupy.cuda.runtime.memGetInfo()
    taken = [cupy.cuda.runtime.malloc(max(0, free - room))]

    def give_back() -> None:
        while taken:
            cupy.cuda.runtime.free(taken.pop())

    try:
        yield give_back
    finally:
        give_back()


@pytest.mark.gpu
def test_a_product_waits_for_memory_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a real GPU is taken away, and comes back when the product has failed once."""
    import cupy

    size = 8192
    a, b = (cupy.random.default_rng(seed).standard_normal((size, size), dtype="f4") for seed in (0, 1))
    choice = KernelChoice("cuda", np.dtype("f4"))
    expected = products.multiply(None, choice, None, [a], [b])
    with all_but(size * size) as give_back:  # a quarter of C
        monkeypatch.setattr(gpu, "PAUSES", (0.0, 0.0))
        emptied: list[int] = []
        empty = gpu.empty_pools

        def empty_pools() -> None:
            emptied.append(1)
            empty()
            give_back()

        monkeypatch.setattr(gpu, "empty_pools", empty_pools)
        made = products.multiply(None, choice, None, [a], [b])
    assert emptied
    assert bool((made == expected).all())


@pytest.mark.gpu
def test_a_product_without_room_fails_with_figures_and_the_next_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(gpu, "PAUSES", (0.0,))
    size = 8192
    a, b = (cupy.random.default_rng(seed).standard_normal((size, size), dtype="f4") for seed in (0, 1))
    choice = KernelChoice("cuda", np.dtype("f4"))
    expected = products.multiply(None, choice, None, [a], [b])
    with (
        all_but(size * size),
        pytest.raises(DeviceMemoryError, match=r"8192 x 8192 float32, found no room .* needs 805 MB"),
    ):
        products.multiply(None, choice, None, [a], [b])
    assert bool((products.multiply(None, choice, None, [a], [b]) == expected).all())

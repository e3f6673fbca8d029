"""Products in lockstep: each one waits until nothing else is under way, and then all workers multiply one block.

Where no product can go on, one finished block of each worker goes to a `Shelf`. What workers hold then is what the plan
lets them hold, and does not depend on who is how fast, or on late messages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, Scheduler, Worker, WorkerPlugin, futures_of, get_worker, secede

from distmm.worker.tasks import products


class Gate(WorkerPlugin):
    """Keeps products, sums of two chains, and blocks on their way to a shelf waiting until they are let through."""

    name = "gate"

    def setup(self, worker: Worker) -> None:
        self.waiting: deque[threading.Event] = deque()
        self.leaving: deque[threading.Event] = deque()
        self.multiply, products.multiply = products.multiply, self.wait_and_multiply
        self.combine, products.combine = products.combine, self.wait_and_combine
        self.before = frozenset(worker.data)  # what the client holds, and what earlier tests have let go just now

    def wait_and_multiply(self, *args: Any, **kwargs: Any) -> Any:
        self.wait()
        return self.multiply(*args, **kwargs)

    def wait_and_combine(self, *args: Any, **kwargs: Any) -> Any:
        self.wait()
        return self.combine(*args, **kwargs)

    def wait(self) -> None:
        self.waiting.append(permit := threading.Event())
        secede()  # the worker's thread goes on with what does not wait: it loads blocks
        permit.wait()

    def teardown(self, worker: Worker) -> None:
        products.multiply, products.combine = self.multiply, self.combine


class Shelf:
    """An array that takes blocks when it is let, and forgets them."""

    chunks = (1, 1)  # any two regions at the same time

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)

    def __setitem__(self, index: object, block: object) -> None:
        get_worker().plugins[Gate.name].leaving.append(permit := threading.Event())
        secede()
        permit.wait()


@contextmanager
def gate(client: Client) -> Iterator[None]:
    """Let products on the workers of `client` wait for `largest_held`."""
    client.register_plugin(Gate())
    try:
        yield
    finally:
        client.unregister_worker_plugin(Gate.name)


Look = tuple[int, bool, bool, int]


def look(dask_worker: Worker) -> Look:
    """Moves so far; whether it is at rest; whether products wait; bytes of arrays that came since the gate.

    Memory that several arrays share counts once.
    """
    state, gate = dask_worker.state, dask_worker.plugins[Gate.name]
    memory = {}
    for key, block in dask_worker.data.items():
        if key not in gate.before and isinstance(block, np.ndarray):
            while isinstance(block.base, np.ndarray):
                block = block.base
            memory[id(block)] = block.nbytes
    held = len(gate.waiting) + len(gate.leaving)
    busy = state.in_flight_tasks or state.executing or state.ready or len(state.long_running) > held
    return state.transition_counter, not busy, bool(gate.waiting), sum(memory.values())


def permit_one(what: str, dask_worker: Worker) -> None:
    if held := getattr(dask_worker.plugins[Gate.name], what):
        held.popleft().set()


def scheduler_moves(dask_scheduler: Scheduler) -> int:
    return dask_scheduler.transition_counter


def largest_held(client: Client, result: da.Array | Future, block: int) -> int:
    """Let a persisted product, or a call, run to its end; return the bytes of the fullest worker at its fullest.

    A task that multiplies adds the block that it writes, of `block` bytes, to what its worker holds.
    """
    peak = 0
    while True:
        done = all(future.done() for future in (futures_of(result) if isinstance(result, da.Array) else [result]))
        looks = at_rest(client)
        peak = max(peak, *(held + waiting * block for *_, waiting, held in looks))
        if done:
            return peak
        permit(client, looks)


def step(client: Client) -> None:
    """Let each worker multiply one block, or where none can, one block leave it."""
    permit(client, at_rest(client))


def at_rest(client: Client) -> list[Look]:
    """Wait until nothing happens any more; return a look at each worker."""
    before = None
    while True:
        looks = list(client.run(look).values())
        now = client.run_on_scheduler(scheduler_moves), [moves for moves, *_ in looks]
        if now == before and all(rest for _, rest, *_ in looks):
            return looks
        before = now
        time.sleep(0.02)


def permit(client: Client, looks: list[Look]) -> None:
    client.run(permit_one, "waiting" if any(waiting for *_, waiting, _ in looks) else "leaving")

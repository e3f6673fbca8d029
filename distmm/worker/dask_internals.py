"""Private parts of Dask's worker that distmm uses, and of all its processes: here and nowhere else.

All versions that the project's pins allow have these parts. The tests
(``tests/distmm/worker/test_dask_internals.py``) fail first for a version that is not in `VERSIONS_SEEN`. A change to a
worker that fails is left out (`distmm.worker.plugin`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client, Worker  # imported late: products without a cluster use this module, too

# Versions of distributed with which these parts have been seen.
VERSIONS_SEEN = ("2026.7.", "2026.8.")

# Seconds after which a thread hands over Python's interpreter lock; Python's default is 0.005. While tasks launch
# kernels, a worker's event loop waits for the lock at each step of a message.
SWITCH_SECONDS = 0.0005

# Seconds from one message of a stream to the next. What is sent meanwhile goes in one message.
MESSAGE_SECONDS = 0.0005


def in_task() -> bool:
    """Whether this thread runs a task of a worker (``distributed.utils.thread_state``)."""
    utils = sys.modules.get("distributed.utils")
    return utils is not None and getattr(utils.thread_state, "key", None) is not None


def made_here(client: Client) -> bool:
    """Whether this process made a client, and not the one that it was forked from, where the client's event loop runs.

    Dask writes the last 14 bits of the process's number into the name of a client (``Client.id``). True without them.
    """
    with contextlib.suppress(ValueError):
        return uuid.UUID(client.id[-36:]).clock_seq == os.getpid() % 2**14
    return True


def without_task_meters() -> AbstractContextManager[Any]:
    """Return a context without the callbacks that measure the current task (``distributed.metrics.context_meter``).

    Long products become slower if Dask adds callbacks to the contexts of tasks that secede, as 2026.7 does.
    """
    from distributed.metrics import context_meter

    return context_meter.clear_callbacks()


def pending_plugins(worker: Worker) -> Iterable[object]:
    """Return the plugins that a starting worker is going to set up (``Worker._pending_plugins``)."""
    return worker._pending_plugins


def profile_without_collecting(worker: Worker) -> None:
    """Keep the garbage collector out of Dask's profiler: on Python 3.11 it can stop the worker for ever.

    The profiler takes the frames of all threads, under the interpreter's lock for its list of threads. Up to Python
    3.11 that may start a collection. Dask's callback then reads the process's memory and lets another thread run. If
    that thread starts one more thread, as each block that is written does, it waits for the list, and the collection
    waits for it: seen here, and in python/cpython issue 106883 and dask/distributed issue 8616.

    This replaces the callback ``"profile"`` of ``Worker.periodic_callbacks``, which calls ``Worker.trigger_profile``.
    """
    if sys.version_info >= (3, 12):
        return
    callback = worker.periodic_callbacks.get("profile")
    if callback is None:  # switched off
        return

    def profile() -> None:
        collecting = gc.isenabled()
        gc.disable()
        try:
            worker.trigger_profile()
        finally:
            if collecting:
                gc.enable()

    callback.callback = profile


def send_soon(process: Any) -> None:
    """Shorten the waits of a client, scheduler or worker between messages to the others (``BatchedSend.interval``).

    Dask waits 2 ms (scheduler to client, worker to scheduler), 5 ms (to workers) or 10 ms (client to scheduler) after a
    message. So a call that follows another one waits for several of them: a task of a few microseconds took 16 ms, and
    6 ms without the waits (two busy cores, TCP). If Dask has changed the streams, they are left as they are.
    """
    streams: list[Any] = [getattr(process, name, None) for name in ("batched_stream", "scheduler_comm")]
    for name in ("stream_comms", "client_comms"):
        streams += getattr(process, name, {}).values()
    for stream in streams:
        if hasattr(stream, "interval"):
            stream.interval = MESSAGE_SECONDS


def fetch_together(worker: Worker, nbytes: int, near: Callable[[str], bool]) -> None:
    """Let a worker ask one with a `near` address for up to so many bytes of blocks at a time; Dask's default is 50 MB.

    A worker sends one request at a time to each other one. A request takes 4 to 10 ms while products run, and the copy
    of 67 MB from GPU to GPU 0.3 ms. Blocks of other workers go through host memory, for which Dask's limit stays.

    It sets ``WorkerState.transfer_message_bytes_limit`` for each address that ``_select_workers_for_gather`` yields.
    That class has slots, so the worker's state becomes one of a class that is derived from it.
    """
    kind, usual = type(worker.state), worker.state.transfer_message_bytes_limit
    if kind.__module__ == __name__:
        return

    def selected(state: Any) -> Iterator[tuple[str, Any]]:
        for address, blocks in kind._select_workers_for_gather(state):
            state.transfer_message_bytes_limit = nbytes if near(address) else usual
            yield address, blocks

    changed = {"__slots__": (), "__module__": __name__, "_select_workers_for_gather": selected}
    worker.state.__class__ = type(kind.__name__, (kind,), changed)


def answer_soon() -> None:
    """Let this process's event loop answer messages while its tasks run Python code (`SWITCH_SECONDS`)."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))


Way = Callable[[dict[Any, Any]], tuple[object | None, AbstractContextManager[Any]]]


def send_blocks_by(
    worker: Worker,
    where: Callable[[str | None], Awaitable[Way | None]],
    broken: Callable[[str | None], object],
) -> None:
    """Let a worker send blocks to the address of a worker by ``await where(address)``; by None, as Dask does.

    ``way(blocks)`` gets the blocks of a message by their keys. It returns what is sent in place of them, which arrives
    as such a dict, or None, and a context in which the message is written. The address is None for clients and
    schedulers.
    ``broken(address)`` is called if the connection breaks: the other side closes it if it cannot read the blocks.

    It replaces the handler ``"get_data"``.
    """
    answer = worker.handlers["get_data"]
    if answer.__module__ == __name__:
        return

    async def answering(comm: Any, *args: Any, who: str | None = None, **how: Any) -> Any:
        way = await where(who)
        try:
            return await answer(comm if way is None else _Sending(comm, way), *args, who=who, **how)
        except OSError:
            broken(who)
            raise

    worker.handlers["get_data"] = answering


class _Sending:
    """A connection whose messages of blocks are sent by a way of their own."""

    def __init__(self, comm: Any, way: Way) -> None:
        self._comm, self._way = comm, way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    async def write(self, message: Any, **how: Any) -> Any:
        from distributed.protocol import to_serialize

        blocks = message.get("data", {}) if isinstance(message, dict) else {}
        sent, context = self._way({key: each.data for key, each in blocks.items()})
        if sent is not None:
            message = message | {"data": to_serialize(sent)}
        with context:
            return await self._comm.write(message, **how)


def gather_from(
    client: Client,
    wanted: Callable[[], bool],
    near: Callable[[str], bool],
    who: str,
    failed: Callable[[list[str]], object],
) -> None:
    """Let a client ask the workers with a `near` address for results, as `who`, and the scheduler for the others.

    While it is not `wanted`, the client asks the scheduler for all, as Dask does.

    A result that does not come, because it has moved, its worker has died or its message could not be read, comes by
    the scheduler, too. ``failed(addresses)`` is called with workers whose connection has broken.

    It replaces ``Client.scheduler.gather``, the message by which Dask's client asks the scheduler for results.
    """
    from distributed.utils_comm import gather_from_workers

    usual, scheduler, pool = client.scheduler.gather, client.scheduler, client.rpc

    async def gather(keys: list[Any], **how: Any) -> dict[str, Any]:
        holders = await scheduler.who_has(keys=keys) if wanted() else {}
        asked = {key: found for key, addresses in holders.items() if (found := [at for at in addresses if near(at)])}
        data, _, _, lost = await gather_from_workers(asked, rpc=pool, who=who)
        if lost:
            failed(sorted(lost))
        if data and len(data) == len(keys):
            return {"status": "OK", "data": data}
        response: dict[str, Any] = await usual(keys=[key for key in keys if key not in data], **how)
        if response["status"] == "OK":
            response["data"].update(data)
        return response

    scheduler.gather = gather


def call_every_second(client: Client, function: Callable[[], None]) -> None:
    """Let the event loop of a client call a function until the client is closed (``Client._periodic_callbacks``)."""
    from tornado.ioloop import PeriodicCallback

    callback = client._periodic_callbacks[function.__name__] = PeriodicCallback(function, 1000)
    client.loop.add_callback(callback.start)


def run_on_worker(worker: Worker, address: str, function: Callable[..., Any], *args: Any) -> Awaitable[dict[str, Any]]:
    """Have another worker run a function, as ``Client.run`` does.

    It sends the message ``"run"``. The reply has ``"status"`` and ``"result"``. If Dask has changed the message,
    awaiting the reply raises.
    """
    from distributed.protocol.pickle import dumps

    return worker.rpc(address).run(function=dumps(function), args=dumps(args))

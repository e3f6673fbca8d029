"""Worker plugin: what would make a worker wait, keep memory, or stop for ever, and shall not."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable

from distributed import Worker, WorkerPlugin
from tornado.ioloop import PeriodicCallback

from distmm.transfer import drop_freed, serialization
from distmm.worker import gpu
from distmm.worker.peer_memory import Peers, pool_handle
from distmm.worker.tasks import pool_bytes

__all__ = [
    "KNOWN",
    "DevicePlugin",
    "profile_without_collecting",
    "synchronize_default_stream",
    "wait_for_default_stream_only",
]

logger = logging.getLogger(__name__)

# Versions with which `wait_for_default_stream_only` has been measured.
KNOWN = {"distributed-ucxx": ("0.52.",), "ucxx": ("0.52.",), "UCX": ("1.21.",)}

TIDY_MILLISECONDS = 1000  # between looks for memory that nobody needs any more


class DevicePlugin(WorkerPlugin):
    """What distmm changes in a worker, its replacements included."""

    name = "distmm-device"
    idempotent = True

    undo: Callable[[], None] | None = None

    def setup(self, worker: Worker) -> None:
        """Prepare a worker that has just started, or that distmm meets for the first time."""
        serialization.register()
        tidy: list[Callable[[], None]] = [drop_freed, gpu.prepared.drop_idle]
        if worker.address.startswith(("ucx://", "ucxx://")):
            self.undo = wait_for_default_stream_only()
            if pool_bytes() is not None and (handle := pool_handle()) is not None:
                self.peers = Peers(worker, handle)
                # Not awaited: a worker that is being started answers nobody, itself included.
                self.introduction = asyncio.create_task(self.peers.introduce(self.name))
                tidy.append(self.peers.close_dead)
        if sys.version_info < (3, 12):
            profile_without_collecting(worker)

        def all_of_it() -> None:
            for each in tidy:
                each()

        callback = PeriodicCallback(all_of_it, TIDY_MILLISECONDS)
        worker.periodic_callbacks["distmm-tidy"] = callback
        callback.start()

    def teardown(self, worker: Worker) -> None:
        """Undo what `setup` started."""
        callback = worker.periodic_callbacks.pop("distmm-tidy", None)
        if callback is not None:
            callback.stop()
        if self.undo is not None:
            self.undo()


def profile_without_collecting(worker: Worker) -> None:
    """Keep the garbage collector out of Dask's profiler, where on Python 3.11 it can stop the worker for ever.

    Often the profiler takes the frames of all threads, under the interpreter's lock for its list of threads. Up
    to Python 3.11 that may start a collection, in which Dask's callback reads the process's memory and lets another
    thread run. If that one starts a thread, as each block that is written does, it waits for the list, and the
    collection for it: seen here, and in python/cpython issue 106883 and dask/distributed issue 8616.
    """
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


def wait_for_default_stream_only() -> Callable[[], None]:
    """Let transfers of distributed-ucxx wait for the default stream, and not for the whole GPU.

    Before each send and receive distributed-ucxx 0.52 calls ``ucxx._cuda_context.synchronize_default_stream``, on the
    worker's event loop. Despite its name that is ``Device.sync()``: it waits for every stream, so that a block of 1 GiB
    takes as long as the product that runs beside it (170 ms instead of 4), and the worker answers nobody meanwhile.
    What is sent is the result of a finished task, and a received buffer is ready when its allocation on the default
    stream is: the default stream is all that need be waited for. Its name is looked up at every call, so one
    assignment is enough. It holds for the whole process, the user's own transfers included, while the plugin is there.

    Returns
    -------
    callable
        Undoes it.
    """
    import distributed_ucxx
    import ucxx
    import ucxx._cuda_context as context

    found = {
        "distributed-ucxx": str(distributed_ucxx.__version__),
        "ucxx": str(ucxx.__version__),
        "UCX": ".".join(map(str, ucxx.get_ucx_version())),
    }
    before = getattr(context, "synchronize_default_stream", None)
    known = all(version.startswith(KNOWN[package]) for package, version in found.items())
    if known and before is not None:
        context.synchronize_default_stream = synchronize_default_stream
    else:
        logger.warning(
            "%s: distmm knows %s, and leaves them as they are: transfers may wait for products",
            ", ".join(f"{package} {version}" for package, version in found.items()),
            ", ".join(f"{package} {'x, '.join(versions)}x" for package, versions in KNOWN.items()),
        )

    def undo() -> None:
        if known and before is not None:
            context.synchronize_default_stream = before

    return undo


def synchronize_default_stream(device_id: int = 0) -> None:
    """Wait until what has been put on the default stream of the current device is done."""
    import cupy

    with cupy.cuda.Device(device_id):
        cupy.cuda.Stream.null.synchronize()

"""The plugin of distmm on each worker: how blocks are sent, what is freed, what is replaced in Dask and UCXX."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from distributed import Worker, WorkerPlugin
from tornado.ioloop import PeriodicCallback

from distmm.all_workers import owns_gpu
from distmm.transfer import block_memory, drop_freed, gpu_allocations, serialization, tickets
from distmm.worker import prepared_operands
from distmm.worker.dask_internals import answer_soon, profile_without_collecting, send_soon
from distmm.worker.neighbours import give_tickets, received
from distmm.worker.ucxx_internals import wait_for_default_stream_only

logger = logging.getLogger(__name__)

FREE_MILLISECONDS = 1000  # between checks for memory that is not needed any more


class DevicePlugin(WorkerPlugin):
    """What distmm changes in a worker, and in the workers that replace it.

    Products are right without the changes, though slower or with less memory: a change that fails is logged and left
    out. Only the serialization of blocks is needed.
    """

    name = "distmm-device"
    idempotent = True

    def setup(self, worker: Worker) -> None:
        """Prepare a worker that has just started, or that distmm meets for the first time."""
        serialization.register()
        tickets.take(received)
        if owns_gpu(worker):
            with _optional("blocks go to other workers of this host by the cluster's protocol"):
                give_tickets(worker, self.name)
        if worker.address.startswith(("ucx://", "ucxx://")):
            with _optional("transfers may wait for products"):
                wait_for_default_stream_only()
        with _optional("small products take some milliseconds more"):
            send_soon(worker)
            answer_soon()
        with _optional("Dask's profiler may stop this worker on Python 3.11"):
            profile_without_collecting(worker)

        def free() -> None:
            drop_freed()
            block_memory.blocks.drop_idle()
            gpu_allocations.drop_idle()
            prepared_operands.prepared.drop_idle()

        block_memory.blocks.reuses = not owns_gpu(worker)
        callback = worker.periodic_callbacks["distmm-free"] = PeriodicCallback(free, FREE_MILLISECONDS)
        callback.start()  # the worker stops it

    def teardown(self, worker: Worker) -> None:
        """Keep no memory in this process, which may be the client's."""
        block_memory.blocks.reuses = False
        block_memory.blocks.freed.clear()


@contextmanager
def _optional(without: str) -> Iterator[None]:
    """Log an exception, and what it means, and go on."""
    try:
        yield
    except Exception:
        logger.warning("a change to this worker has failed: %s", without, exc_info=True)

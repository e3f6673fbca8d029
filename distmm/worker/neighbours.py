"""Which workers read this worker's memory: they get tickets of its GPU blocks (`distmm.transfer.tickets`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from distributed import Worker
from distributed.comm import get_address_host

from distmm.errors import InputError
from distmm.transfer import ClientArray, gpu_allocations, process_memory, serialization, tickets
from distmm.worker import gpu, gpu_copies
from distmm.worker.dask_internals import Way, fetch_together, run_on_worker, send_blocks_by

logger = logging.getLogger(__name__)

# What a client of this host says instead of an address when it asks for blocks (`distmm.clusters.results`).
CLIENT = "distmm-client"

# Processes, and when they were started, whose GPU memory this one has failed to map.
_unreachable: set[tuple[int, str | None]] = set()

# Bytes of the blocks that a worker asks another one of its host for at a time: 2 ms of copies from GPU to GPU.
TOGETHER = 1 << 29


def give_tickets(worker: Worker, plugin: str) -> None:
    """Send blocks by tickets to workers of this host that read this worker's memory, and that have `plugin`.

    Each of them is asked at its first request for blocks, and again when it has closed a connection. Clients that ask
    as `CLIENT` get tickets, too: if they cannot read the memory, they ask the scheduler for the elements. Other
    clients, and schedulers, get the elements through host memory (`distmm.transfer.serialization`).
    """
    reads: dict[str | None, bool | None] = {}  # by address; None until it has the plugin
    process_memory.allow(os.getppid())  # the workers that the same process has started

    def on_this_host(address: str) -> bool:
        return get_address_host(address) == get_address_host(worker.address)

    async def way(address: str | None) -> Way | None:
        if address == CLIENT:
            return _by_tickets
        if address is None:
            return _through_host
        if not on_this_host(address):
            return None
        if reads.get(address) is None:
            reads[address] = await _asked(worker, address, plugin)
        return _by_tickets if reads[address] else None

    send_blocks_by(worker, way, lambda address: reads.pop(address, None))
    fetch_together(worker, TOGETHER, on_this_host)


def _by_tickets(blocks: dict[Any, Any]) -> tuple[object | None, AbstractContextManager[None]]:
    return tickets.tickets_for(blocks), nullcontext()


def _through_host(blocks: dict[Any, Any]) -> tuple[None, AbstractContextManager[None]]:
    return None, serialization.through_host(blocks.values())


async def _asked(worker: Worker, address: str, plugin: str) -> bool | None:
    """Ask the worker at an address whether it reads this worker's memory."""
    from cupy.cuda import runtime

    try:
        on_gpu = gpu_allocations.secret(runtime.getDevice())
        reply = await run_on_worker(worker, address, _reads, plugin, process_memory.proof(), on_gpu)
    except Exception:  # a worker that ends, or another version of Dask: the elements are sent
        logger.warning("%s was not asked whether it reads this worker's GPU memory", address, exc_info=True)
        return False
    answer: bool | None = reply["result"] if reply["status"] == "OK" else False
    if answer is False:
        logger.warning(
            "%s does not reach this worker's GPU memory: blocks go there as Dask sends them, which is slower. Reasons "
            "may be MIG, GPUs without peer access, another user, a container with an IPC namespace of its own, or maps "
            "of freed memory that UCX keeps",
            address,
        )
    return answer


def _reads(
    plugin: str,
    proof: process_memory.Proof,
    on_gpu: tuple[gpu_allocations.Allocation | None, int, bytes],
    dask_worker: Worker,
) -> bool | None:
    """Whether this worker reads another one's host memory and GPU memory; None without the plugin."""
    if plugin not in dask_worker.plugins:
        return None
    allocation, address, expected = on_gpu
    reads = (
        allocation is not None
        and allocation.owner not in _unreachable
        and process_memory.can_read(*proof)
        and gpu_allocations.can_map(allocation, address, expected, dask_worker)
    )
    if reads:
        # This module registers Dask's own functions. A block may arrive while another thread imports it, so it is
        # imported now, and ours are registered after them.
        import distributed.protocol.cupy  # noqa: F401

        serialization.register()
    return reads


def received(named: Sequence[ClientArray]) -> list[Any]:
    """Return copies of the blocks that tickets of one process name.

    Raises
    ------
    EOFError
        If their worker has freed one, so that other elements may have been copied, or if this process cannot map one.
        Dask then closes the connection and asks again. If it cannot be mapped, the elements are sent then (`_reads`).
    """
    nbytes = sum(each.nbytes for each in named)
    try:
        return gpu.retrying(partial(gpu_copies.copies, named), "a copy of another worker's blocks", nbytes)
    except InputError as error:
        raise EOFError(f"a block of process {named[0].pid} was freed while it was copied") from error
    except OSError as error:
        _unreachable.update(
            each.segment.owner for each in named if isinstance(each.segment, gpu_allocations.Allocation)
        )
        raise EOFError(f"a block was not copied from GPU to GPU: {error}") from error

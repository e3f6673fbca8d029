"""Tickets: CuPy blocks for another process of this host are sent by name, whatever the cluster's protocol.

Dask sends a CuPy block by TCP through host memory, at 1 to 2 GB/s. UCX is fast, but it (1.21) never unmaps the memory
of a worker that has died (openucx/ucx issue 11753), so that its replacement finds none. A ticket is a `ClientArray`
that names the block in the sender's memory, which the receiver maps by CUDA IPC. Dask keeps the block in the sender's
``get_data`` until the receiver has answered, which it does after the copy. If the connection breaks meanwhile, the
sender may free the block. So the receiver checks the mark of the ticket after the copy. If it is gone, the message
counts as truncated, and Dask asks again.

All blocks of a message are named in one frame, and copied together: a frame of its own for each took 1.6 ms of both
event loops (chunks of 17 MB, two H200).

A sender gives tickets to a worker that has read random bytes in its host memory and in its GPU memory, and to a client
that asks for them (`distmm.clusters.results`). If one of them cannot copy a block, the message counts as truncated,
too. The worker is then asked again whether it reads the memory, and the client gets the elements through the scheduler.
"""

from __future__ import annotations

import functools
import logging
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distributed.protocol import deserialize, serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from distmm.transfer import loans
from distmm.transfer.client_array import ClientArray
from distmm.transfer.lending import ascends, has_gaps

logger = logging.getLogger(__name__)

# Blocks of fewer bytes are sent through host memory.
LEAST = 1 << 20


@dataclass(frozen=True)
class Tickets:
    """Blocks of a message, by key: those that are sent by name, and the others. It arrives as one dict of blocks."""

    named: dict[Any, ClientArray]
    others: dict[Any, Any]


def tickets_for(blocks: dict[Any, Any]) -> Tickets | None:
    """Return tickets for CuPy blocks; None if there are none.

    Blocks with gaps between their elements, blocks that do not ascend (`ascends`), small blocks, and those in memory
    without a handle get no ticket. Work on the default stream is waited for, because other libraries may have made the
    blocks there.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    large = {key: x for key, x in blocks.items() if isinstance(x, cupy.ndarray) and x.nbytes >= LEAST}
    named = {key: ClientArray.of(x) for key, x in large.items() if not has_gaps(x) and ascends(x)}
    if not all(ticket.on_gpu for ticket in named.values()):
        _warn()
    named = {key: replace(each, mark=loans.marked(blocks[key])) for key, each in named.items() if each.on_gpu}
    if not named:
        return None
    cupy.cuda.Stream.null.synchronize()
    return Tickets(named, {key: x for key, x in blocks.items() if key not in named})


@functools.cache
def _warn() -> None:
    """Say once that GPU memory has no handle."""
    logger.warning(
        "blocks go to other workers of this host through host memory, which is slower: CUDA IPC does not share the "
        "memory of this worker's allocator. Start the cluster with rmm_pool_size in place of rmm_async or "
        "rmm_managed_memory"
    )


@dask_serialize.register(Tickets)  # type: ignore[untyped-decorator]
def _sent(tickets: Tickets) -> tuple[dict[str, Any], list[Any]]:
    others, frames = serialize(tickets.others, iterate_collection=True)
    return {"others": others}, [pickle.dumps(tickets.named), *frames]


def take(copies: Callable[[Sequence[ClientArray]], list[Any]]) -> None:
    """Let this process receive tickets. ``copies(tickets)`` returns copies of the blocks that they name."""

    def received(header: dict[str, Any], frames: list[Any]) -> dict[Any, Any]:
        named: dict[Any, ClientArray] = pickle.loads(bytes(frames[0]))
        return dict(zip(named, copies(list(named.values())), strict=True)) | deserialize(header["others"], frames[1:])

    dask_deserialize.register(Tickets, received)

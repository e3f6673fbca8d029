"""Blocks in GPU memory that a worker sends to another worker of its host by name: the receiver copies from there.

Dask sends a CuPy block by TCP through host memory, at 1 to 2 GB/s. UCX is fast, but it (1.21) never unmaps the memory
of a worker that has died (openucx/ucx issue 11753), so that its replacement finds none. A ticket is a `ClientArray`
that names the block in the sender's memory, which the receiver maps by CUDA IPC. Dask keeps the block in the sender's
``get_data`` until the receiver has answered, which it does after the copy. If the connection breaks meanwhile, the
sender may free the block. So the receiver checks the mark of the ticket after the copy. If it is gone, the message
counts as truncated, and Dask asks again.

A sender gives tickets only to a worker that has read random bytes in its host memory and in its GPU memory.
"""

from __future__ import annotations

import logging
import pickle
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import Any

from distmm.transfer import loans
from distmm.transfer.client_array import ClientArray
from distmm.transfer.lending import has_gaps

logger = logging.getLogger(__name__)

# Blocks of fewer bytes are sent through host memory.
SMALLEST = 1 << 20

# The ids of the blocks in the message that is written now, if it goes to a worker that reads this process's GPU memory.
to_neighbour: ContextVar[frozenset[int]] = ContextVar("to_neighbour", default=frozenset())


@cache
def _warn() -> None:
    """Say once that GPU memory has no handle."""
    logger.warning(
        "blocks go to other workers of this host through host memory, which is slower: CUDA IPC does not share the "
        "memory of this worker's allocator. Start the cluster with rmm_pool_size in place of rmm_async or "
        "rmm_managed_memory"
    )


def leaves_gpu(block: Any) -> bool:
    """Whether a CuPy block is sent by a ticket or through host memory, also where UCX could send it.

    UCX sends blocks to the client and to other hosts, and blocks with gaps between their elements.
    """
    return id(block) in to_neighbour.get() and not has_gaps(block)


def ticket_for(block: Any) -> bytes | None:
    """Return a pickled ticket for a CuPy block; None if its elements have to be sent.

    Work on the default stream is waited for, because other libraries may have made the block there.
    """
    if not leaves_gpu(block) or block.nbytes < SMALLEST:
        return None
    ticket = ClientArray.of(block)
    if not ticket.on_gpu:
        _warn()
        return None
    import cupy

    cupy.cuda.Stream.null.synchronize()
    return pickle.dumps(replace(ticket, mark=loans.marked(block)))

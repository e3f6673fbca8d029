"""Additions to Dask's serialization: checksums of blocks, and the type of bfloat16 blocks on GPUs.

*Checksums.* TCP's checksum has only 16 bits, and host memory without ECC has none. So a block that is sent from host
memory has a checksum in its header, and the receiver compares it. If it differs, the receiver treats the message as
truncated: it closes the connection and requests the block again. Blocks that Dask has spilled to disk have the checksum
too, and a task that needs a damaged one fails.

NVLink, PCIe and InfiniBand check and repeat their packets themselves, and the memory of data-centre GPUs corrects its
errors. So blocks that GPUs send to each other have no checksum.

*Tickets.* A CuPy block for another worker of this host is sent by name, whatever the cluster's protocol. Dask sends a
CuPy block by TCP through host memory, at 1 to 2 GB/s. UCX is fast, but it (1.21) never unmaps the memory of a worker
that has died (openucx/ucx issue 11753), so that its replacement finds none. A ticket is a `ClientArray` that names the
block in the sender's memory, which the receiver maps by CUDA IPC. Dask keeps the block in the sender's ``get_data``
until the receiver has answered, which it does after the copy. If the connection breaks meanwhile, the sender may free
the block. So the receiver checks the mark of the ticket after the copy. If it is gone, the message counts as truncated,
and Dask asks again.

A sender gives tickets to a worker that has read random bytes in its host memory and in its GPU memory, and to a client
that asks for them (`distmm.clusters.results`). If one of them cannot copy the block, its message counts as truncated,
too. The worker is then asked again whether it reads the memory, and the client gets the elements through the scheduler.

*Types.* Dask describes a CuPy block by CUDA's array interface, which supports only NumPy's own types. So a bfloat16
block would arrive as untyped elements of two bytes (``|V2``).

Only this module uses these private parts of Dask: ``Dispatch._lookup``, the keys of the headers, and the rules that an
EOFError means a truncated message, and that a block whose function for GPU memory raises NotImplementedError is sent by
the function for host memory.
"""

from __future__ import annotations

import functools
import logging
import pickle
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import distributed.protocol.numpy  # noqa: F401  registers the functions that are wrapped here
import ml_dtypes  # noqa: F401  tells NumPy the names of its types
import numpy as np
from dask.utils import Dispatch
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize
from distributed.utils import nbytes

from distmm.transfer import loaded_blocks, loans
from distmm.transfer.client_array import ClientArray
from distmm.transfer.crc32c import crc32c
from distmm.transfer.lending import has_gaps

logger = logging.getLogger(__name__)

# Keys that are added to the headers of messages.
KEY, SUM, NOTED, TICKET = "distmm-element", "distmm-crc32c", "distmm-crc32c-loaded", "distmm-ticket"

# Messages of fewer bytes get no checksum; blocks of large products are larger.
SMALLEST = 256

Send = Callable[..., tuple[dict[str, Any], list[Any]]]
Receive = Callable[[dict[str, Any], list[Any]], Any]


class ChangedOnTheWayError(EOFError):
    """A block changed between sender and receiver. Dask treats an EOFError as a truncated message and sends again."""


def register(received: Callable[[Any], Any] | None = None) -> None:
    """Make Dask send checksums of blocks in host memory and, from the first CuPy block on, the type of elements.

    Parameters
    ----------
    received : callable, optional
        Returns a copy of the block that a ticket names.
    """
    _replace(dask_serialize, dask_deserialize, np.ndarray, _with_sums)
    wrap = functools.partial(_wrap, received)
    if "distributed.protocol.cupy" in sys.modules:
        wrap()
        return
    for dispatch in (cuda_serialize, cuda_deserialize, dask_serialize, dask_deserialize):
        dispatch.register_lazy("cupy", wrap)


def _wrap(received: Callable[[Any], Any] | None) -> None:
    import cupy
    import distributed.protocol.cupy  # noqa: F401  registers the functions that are wrapped here

    def between_gpus(send: Send, receive: Receive) -> tuple[Send, Receive]:
        named, typed = _with_types(send, receive)

        def refusing(x: Any) -> tuple[dict[str, Any], list[Any]]:
            if leaves_gpu(x):
                raise NotImplementedError("Dask then sends it by the next function")
            return named(x)

        return refusing, typed

    def through_host(send: Send, receive: Receive) -> tuple[Send, Receive]:
        return _with_tickets(*_with_sums(*_with_types(send, receive)), received)

    _replace(cuda_serialize, cuda_deserialize, cupy.ndarray, between_gpus)
    _replace(dask_serialize, dask_deserialize, cupy.ndarray, through_host)


def _replace(
    serialize: Dispatch,
    deserialize: Dispatch,
    block: type,
    wrapped: Callable[[Send, Receive], tuple[Send, Receive]],
) -> None:
    """Replace the functions that send and receive blocks, unless they are replaced already."""
    send, receive = (dispatch._lookup[block] for dispatch in (serialize, deserialize))
    if send.__module__ == __name__:
        return
    for dispatch, function in zip((serialize, deserialize), wrapped(send, receive), strict=True):
        dispatch.register(block, function)


def _with_types(send: Send, receive: Receive) -> tuple[Send, Receive]:
    """Wrap both functions to send the element type, for types that CUDA's array interface does not support."""

    def named(x: Any) -> tuple[dict[str, Any], list[Any]]:
        header, frames = send(x)
        # the fields of a structured type, which 8-bit floats have on GPUs, or a name
        return (
            header | {KEY: x.dtype.descr if x.dtype.names else x.dtype.name} if x.dtype.kind == "V" else header
        ), frames

    def typed(header: dict[str, Any], frames: list[Any]) -> Any:
        if KEY in header:
            kind = header[KEY]
            header = header | {"typestr": np.dtype(kind if isinstance(kind, str) else [tuple(field) for field in kind])}
        return receive(header, frames)

    return named, typed


def _with_tickets(send: Send, receive: Receive, received: Callable[[Any], Any] | None) -> tuple[Send, Receive]:
    """Wrap both functions to send a ticket to a worker or client that reads this process's GPU memory."""

    def named(x: Any) -> tuple[dict[str, Any], list[Any]]:
        ticket = ticket_for(x)
        return send(x) if ticket is None else ({TICKET: True}, [ticket])

    def taken(header: dict[str, Any], frames: list[Any]) -> Any:
        if TICKET not in header:
            return receive(header, frames)
        assert received is not None
        return received(pickle.loads(bytes(frames[0])))

    return named, taken


def _checksum(frames: list[Any]) -> int | None:
    """Return the CRC-32C of frames in host memory; None for small ones."""
    if sum(map(nbytes, frames)) < SMALLEST:
        return None
    crc = 0
    for frame in filter(nbytes, frames):
        crc = crc32c(np.frombuffer(frame, np.uint8), crc)
    return crc


def _with_sums(send: Send, receive: Receive) -> tuple[Send, Receive]:
    """Wrap both functions to send a checksum of each block and to compare it at the receiver."""

    @functools.wraps(send, assigned=())  # Dask inspects whether the function takes a context
    def summed(x: Any, **how: Any) -> tuple[dict[str, Any], list[Any]]:
        header, frames = send(x, **how)
        sums = {SUM: _checksum(frames), NOTED: loaded_blocks.noted(x)}
        return header | {key: crc for key, crc in sums.items() if crc is not None}, frames

    def compared(header: dict[str, Any], frames: list[Any]) -> Any:
        if SUM in header and header[SUM] != (found := _checksum(frames)):
            raise ChangedOnTheWayError(
                f"a block of {sum(map(nbytes, frames))} bytes was changed on its way between two workers, or on the "
                f"disk to which Dask has written it: its CRC-32C was {header[SUM]:08x}, and is {found or 0:08x}"
            )
        block = receive(header, frames)
        if NOTED in header:
            loaded_blocks.note(block, header[NOTED])
        return block

    return summed, compared


# Tickets

# Blocks of fewer bytes are sent through host memory.
LEAST_BY_TICKET = 1 << 20

# The ids of the blocks in the message that is written now: to a worker that reads this process's GPU memory, or to a
# client that asks for tickets; and to another client, or to a scheduler.
by_ticket: ContextVar[frozenset[int]] = ContextVar("by_ticket", default=frozenset())
through_host: ContextVar[frozenset[int]] = ContextVar("through_host", default=frozenset())


@functools.cache
def _warn() -> None:
    """Say once that GPU memory has no handle."""
    logger.warning(
        "blocks go to other workers of this host through host memory, which is slower: CUDA IPC does not share the "
        "memory of this worker's allocator. Start the cluster with rmm_pool_size in place of rmm_async or "
        "rmm_managed_memory"
    )


def leaves_gpu(block: Any) -> bool:
    """Whether a CuPy block is sent by a ticket or through host memory, also where UCX could send it.

    UCX sends blocks to other hosts, and to neighbours blocks with gaps between their elements.
    """
    return id(block) in through_host.get() or (id(block) in by_ticket.get() and not has_gaps(block))


def ticket_for(block: Any) -> bytes | None:
    """Return a pickled ticket for a CuPy block; None if its elements have to be sent.

    Work on the default stream is waited for, because other libraries may have made the block there.
    """
    if id(block) not in by_ticket.get() or has_gaps(block) or block.nbytes < LEAST_BY_TICKET:
        return None
    ticket = ClientArray.of(block)
    if not ticket.on_gpu:
        _warn()
        return None
    import cupy

    cupy.cuda.Stream.null.synchronize()
    return pickle.dumps(replace(ticket, mark=loans.marked(block)))

"""Additions to Dask's serialization: checksums of blocks, types of blocks on GPUs, and blocks that UCX shall not send.

*Checksums.* TCP's checksum has only 16 bits, and host memory without ECC has none. So a block that is sent from host
memory has a checksum in its header, and the receiver compares it. If it differs, the receiver treats the message as
truncated: it closes the connection and requests the block again. Blocks that Dask has spilled to disk have the checksum
too, and a task that needs a damaged one fails.

NVLink, PCIe and InfiniBand check and repeat their packets themselves, and the memory of data-centre GPUs corrects its
errors. So blocks that GPUs send to each other have no checksum.

*Clients* and schedulers get CuPy blocks through host memory, also where UCX could send them. UCX would map the GPU
memory in which they receive blocks, and keep the maps. Memory that they later allocate at the same addresses could not
be lent.

*Types.* Dask describes a CuPy block by CUDA's array interface, which supports only NumPy's own types. So a bfloat16
block would arrive as untyped elements of two bytes (``|V2``).

Only this module uses these private parts of Dask: ``Dispatch._lookup``, the keys of the headers, and the rules that an
EOFError means a truncated message, and that a block whose function for GPU memory raises NotImplementedError is sent by
the function for host memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import distributed.protocol.numpy  # noqa: F401  registers the functions that are wrapped here
import ml_dtypes  # noqa: F401  tells NumPy the names of its types
import numpy as np
from dask.utils import Dispatch
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize
from distributed.utils import nbytes

from distmm.transfer import loaded_blocks
from distmm.transfer.crc32c import crc32c

# Keys that are added to the headers of messages.
KEY, SUM, NOTED = "distmm-element", "distmm-crc32c", "distmm-crc32c-loaded"

Send = Callable[..., tuple[dict[str, Any], list[Any]]]
Receive = Callable[[dict[str, Any], list[Any]], Any]


def register() -> None:
    """Make Dask send checksums of blocks in host memory and, from the first CuPy block on, the type of elements."""
    _replace(dask_serialize, dask_deserialize, np.ndarray, _with_sums)
    if "distributed.protocol.cupy" in sys.modules:
        _wrap()
        return
    for dispatch in (cuda_serialize, cuda_deserialize, dask_serialize, dask_deserialize):
        dispatch.register_lazy("cupy", _wrap)


def _wrap() -> None:
    import cupy
    import distributed.protocol.cupy  # noqa: F401  registers the functions that are wrapped here

    def by_host(send: Send, receive: Receive) -> tuple[Send, Receive]:
        return _with_sums(*_with_types(send, receive))

    _replace(cuda_serialize, cuda_deserialize, cupy.ndarray, _between_gpus)
    _replace(dask_serialize, dask_deserialize, cupy.ndarray, by_host)


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
        if x.dtype.kind == "V":  # its fields, which 8-bit floats have on GPUs, or its name
            header = header | {KEY: x.dtype.descr if x.dtype.names else x.dtype.name}
        return header, frames

    def typed(header: dict[str, Any], frames: list[Any]) -> Any:
        if KEY in header:
            kind = header[KEY]
            header = header | {"typestr": np.dtype(kind if isinstance(kind, str) else [tuple(field) for field in kind])}
        return receive(header, frames)

    return named, typed


def _between_gpus(send: Send, receive: Receive) -> tuple[Send, Receive]:
    """Wrap both functions to send the element type, and to refuse blocks that go `through_host`."""
    named, typed = _with_types(send, receive)

    def refusing(x: Any) -> tuple[dict[str, Any], list[Any]]:
        if id(x) in _by_host.get():
            raise NotImplementedError("Dask then sends it by the next function")
        return named(x)

    return refusing, typed


# The ids of the blocks in the message that is written now, if they go through host memory. Other blocks may be
# serialized meanwhile, because Dask moves them out of a full memory.
_by_host: ContextVar[frozenset[int]] = ContextVar("_by_host", default=frozenset())


@contextmanager
def through_host(blocks: Iterable[Any]) -> Iterator[None]:
    """Send these CuPy blocks through host memory while the ``with`` block runs."""
    before = _by_host.set(frozenset(map(id, blocks)))
    try:
        yield
    finally:
        _by_host.reset(before)


def _checksum(frames: list[Any]) -> int:
    """Return the CRC-32C of frames in host memory."""
    crc = 0
    for frame in filter(nbytes, frames):
        crc = crc32c(np.frombuffer(frame, np.uint8), crc)
    return crc


def _with_sums(send: Send, receive: Receive) -> tuple[Send, Receive]:
    """Wrap both functions to send a checksum of each block and to compare it at the receiver."""

    @functools.wraps(send, assigned=())  # Dask inspects whether the function takes a context
    def summed(x: Any, **how: Any) -> tuple[dict[str, Any], list[Any]]:
        header, frames = send(x, **how)
        noted = loaded_blocks.noted(x)
        return header | {SUM: _checksum(frames)} | ({} if noted is None else {NOTED: noted}), frames

    def compared(header: dict[str, Any], frames: list[Any]) -> Any:
        if SUM in header and header[SUM] != (found := _checksum(frames)):
            raise EOFError(
                f"a block of {sum(map(nbytes, frames))} bytes was changed on its way between two workers, or on the "
                f"disk to which Dask has written it: its CRC-32C was {header[SUM]:08x}, and is {found:08x}"
            )
        block = receive(header, frames)
        if NOTED in header:
            loaded_blocks.note(block, header[NOTED])
        return block

    return summed, compared

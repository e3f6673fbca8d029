"""Arrays on their way to the client: it reads them in the memory of the workers of its own machine.

Dask sends data in one of several ways ("families of serializers"), which the receiver may name, best first. The first
of `FAMILIES` sends an address, and the client copies what is there (`distmm.transfer.process_memory`). It is there
until then: a worker that a client asks directly, not through the scheduler, holds the data until the client has
answered that it has them (``Worker.get_data``). So only such requests may name this family. They take it from the
attribute `serializers` of the client's pool of connections; requests to the scheduler keep what the client was made
with. Seen on Dask 2026.8.0; ``tests/distmm/transfer/test_blocks_to_client.py`` fails first when it changes.

A worker sends addresses if the client has read from its memory before. Other workers, such as those that joined later,
send arrays as Dask does; and where a read fails, Dask asks again through the scheduler.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
from distributed import Client
from distributed.protocol.serialize import register_serialization_family

from distmm.all_workers import everywhere
from distmm.transfer import process_memory
from distmm.transfer.client_array import SMALLEST, ClientArray

__all__ = ["FAMILIES", "offer", "register"]

FAMILY = "distmm-address"

FAMILIES = [FAMILY, "dask", "pickle"]

_offering = False  # whether this process is a worker whose memory the client reads


def _dumps(x: Any) -> tuple[dict[str, Any], list[Any]]:
    """Say where an array is; `NotImplementedError` makes Dask take the next family."""
    plain = type(x) is np.ndarray and not x.dtype.hasobject and x.dtype.isnative
    if not _offering or not plain or x.nbytes < SMALLEST:
        raise NotImplementedError
    if not (x.flags.c_contiguous or (x.ndim == 2 and x.flags.f_contiguous)):
        raise NotImplementedError
    return {"array": pickle.dumps(ClientArray.of(x))}, []


def _loads(header: dict[str, Any], frames: list[Any]) -> np.ndarray:
    """Copy the array."""
    array: ClientArray = pickle.loads(header["array"])
    found = array[(slice(None),) * array.ndim]
    return found.copy() if array.is_local else found


def register() -> None:
    """Let clients that ask for it be sent addresses by this process, or let this process be sent them."""
    register_serialization_family(FAMILY, _dumps, _loads)


def offer(client: Client) -> None:
    """Have the workers that are there now send addresses to this client, if it can read the memory of all of them.

    The client is one that asks workers directly (``direct_to_workers=True``).
    """
    if not process_memory.allow() or not hasattr(client.rpc, "serializers"):
        return  # no such memory on this system, or a version of Dask that is not known
    places = everywhere(client, _place)
    if all(process_memory.can_read(*place) for place in places.values()):
        everywhere(client, _set_offering, True)
        client.rpc.serializers = FAMILIES


def _place() -> tuple[int, int, bytes]:
    secret = process_memory.secret()
    return os.getpid(), secret.ctypes.data, secret.tobytes()


def _set_offering(offering: bool) -> None:
    global _offering
    _offering = offering

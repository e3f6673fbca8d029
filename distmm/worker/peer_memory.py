"""Memory of dead workers on this host, which UCX would keep from the GPU for as long as the living ones run.

UCX maps the pool of each worker that it fetches from, and keeps it mapped (``cuIpcOpenMemHandle``; openucx/ucx issue
11753, UCX 1.21): the GPU of a worker that was killed has no memory for the one in its place. The driver counts how
often a process has opened a pool, and opening one that is open gives the address that it has. So workers that meet open
each other's pools, and when a process is gone the others close its pool twice: for themselves and for UCX.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import Any

from distributed import Worker
from distributed.comm import get_address_host
from distributed.protocol.pickle import dumps

from distmm.pid import born, machine

__all__ = ["Peers", "pool_handle"]

logger = logging.getLogger(__name__)

# Looks at which a process must be gone before its pool is closed: transfers that it had begun have failed by then.
LOOKS = 3

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, as UCX opens pools


class Peers:
    """Other workers of this host whose pools this one may have mapped.

    Parameters
    ----------
    worker : distributed.Worker
    pool : bytes
        What other processes open this one's pool with.
    """

    def __init__(self, worker: Worker, pool: bytes) -> None:
        self.worker = worker
        self.addresses: dict[int, int] = {}  # process -> where its pool is here
        self.missing: dict[int, int] = {}  # process that is gone -> looks at which it was
        self.card = {"machine": machine(), "pid": os.getpid(), "pool": pool}

    async def introduce(self, plugin: str) -> None:
        """Meet the other workers of this host that have `plugin` already: each answers with its own card."""
        message = {"op": "run", "function": dumps(_meet), "args": dumps((plugin, self.card))}
        here = [get_address_host(self.worker.address)]
        replies = await self.worker.scheduler.broadcast(msg=message, hosts=here, on_error="ignore")
        for reply in replies.values():
            if reply["status"] == "OK" and reply["result"] is not None:
                self.open(**reply["result"])

    def open(self, machine: str, pid: int, pool: bytes) -> None:
        """Open the pool of another process of this machine."""
        from cupy.cuda import runtime

        if machine != self.card["machine"] or pid == self.card["pid"] or pid in self.addresses:
            return
        try:
            self.addresses[pid] = runtime.ipcOpenMemHandle(pool, LAZY_PEER_ACCESS)
        except runtime.CUDARuntimeError as error:  # without peer access UCX does not map it either
            logger.info("the GPU memory of process %d cannot be mapped: %s", pid, error)

    def close_dead(self) -> None:
        """Unmap the pools of processes that are gone. Called again and again, on the worker's event loop."""
        from cupy.cuda import runtime

        for pid in [pid for pid in self.addresses if born(pid) is None]:
            self.missing[pid] = self.missing.get(pid, 0) + 1
            if self.missing[pid] == LOOKS:
                del self.missing[pid]
                # In a thread: to close is to wait for all that the GPU does, and the event loop answers others.
                about = self.addresses.pop(pid), runtime.getDevice()
                threading.Thread(target=_close, args=about, name="distmm-close-pool", daemon=True).start()


def pool_handle() -> bytes | None:
    """Return what other processes open this one's pool with; None where GPU memory cannot be shared (MIG).

    It is that of any memory from the pool.
    """
    import rmm
    from cupy.cuda import runtime

    try:
        return bytes(runtime.ipcGetMemHandle(rmm.DeviceBuffer(size=256).ptr))
    except runtime.CUDARuntimeError as error:
        logger.info("this process's GPU memory cannot be shared: %s", error)
        return None


def _meet(plugin: str, card: dict[str, Any], dask_worker: Worker) -> dict[str, Any] | None:
    """Take another worker's card, and give one's own. Runs on workers."""
    peers: Peers | None = getattr(dask_worker.plugins.get(plugin), "peers", None)
    if peers is None:
        return None
    peers.open(**card)
    return peers.card


def _close(address: int, device: int) -> None:
    from cupy.cuda import runtime

    runtime.setDevice(device)  # of this thread
    runtime.deviceSynchronize()  # what is still being copied from there
    runtime.ipcCloseMemHandle(address)
    with suppress(runtime.CUDARuntimeError):  # UCX has not mapped it
        runtime.ipcCloseMemHandle(address)

"""GPU memory of dead workers of this host: unmapped by the others, because UCX keeps it mapped.

UCX maps the pool of each worker that it fetches from, and never unmaps it (``cuIpcOpenMemHandle``; openucx/ucx issue
11753, UCX 1.21). So after a worker was killed, its GPU has no memory for the worker that replaces it. The driver counts
how often a process has opened a pool, and opening an open pool returns its address. So the workers of a host open each
other's pools. When a process is gone, the others close its pool twice: once for themselves and once for UCX.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from distributed import Worker
from distributed.comm import get_address_host

from distmm.pid import machine, start_time
from distmm.transfer import gpu_allocations
from distmm.worker.dask_internals import run_on_workers

logger = logging.getLogger(__name__)

# A process must be missing in this many checks before its pool is closed: its transfers have failed by then.
LOOKS = 3


class Peers:
    """Other workers of this host whose pools this one may have mapped.

    Parameters
    ----------
    worker : distributed.Worker
    pool : bytes
        The handle with which other processes open this one's pool.
    """

    def __init__(self, worker: Worker, pool: bytes) -> None:
        self.worker = worker
        self.addresses: dict[int, int] = {}  # by process: where its pool is mapped here
        self.missing: dict[int, int] = {}  # by process that is gone: checks in which it was missing
        self.identity = {"machine": machine(), "pid": os.getpid(), "pool": pool}

    async def introduce(self, plugin: str) -> None:
        """Exchange identities with the other workers of this host that have `plugin` already."""
        try:
            replies = await run_on_workers(
                self.worker, get_address_host(self.worker.address), _exchange, plugin, self.identity
            )
            identities = [reply["result"] for reply in replies.values() if reply["status"] == "OK"]
        except Exception:  # a worker that ends, or another version of Dask: products go on without this
            logger.warning("other workers of this host are unknown: their memory may stay in use", exc_info=True)
            return
        for identity in identities:
            if identity is not None:
                self.open(**identity)

    def open(self, machine: str, pid: int, pool: bytes) -> None:
        """Open the pool of another process of this machine."""
        from cupy.cuda import runtime

        if machine != self.identity["machine"] or pid == self.identity["pid"] or pid in self.addresses:
            return
        try:
            self.addresses[pid] = runtime.ipcOpenMemHandle(pool, gpu_allocations.LAZY_PEER_ACCESS)
        except runtime.CUDARuntimeError as error:  # without peer access UCX does not map it either
            logger.info("the GPU memory of process %d cannot be mapped: %s", pid, error)

    def close_dead(self) -> None:
        """Unmap the pools of processes that are gone. Called every second on the worker's event loop."""
        for pid in [pid for pid in self.addresses if start_time(pid) is None]:
            self.missing[pid] = self.missing.get(pid, 0) + 1
            if self.missing[pid] == LOOKS:
                del self.missing[pid]
                gpu_allocations.close([self.addresses.pop(pid)] * 2)  # once for UCX, if it has mapped it


def pool_handle() -> bytes | None:
    """Return the handle with which other processes open this one's pool; None where it cannot be shared (MIG).

    Any memory of the pool has the pool's handle.
    """
    import rmm
    from cupy.cuda import runtime

    try:
        return bytes(runtime.ipcGetMemHandle(rmm.DeviceBuffer(size=256).ptr))
    except runtime.CUDARuntimeError as error:
        logger.info("this process's GPU memory cannot be shared: %s", error)
        return None


def _exchange(plugin: str, identity: dict[str, Any], dask_worker: Worker) -> dict[str, Any] | None:
    """Take another worker's identity, and return this worker's own. Runs on workers."""
    peers: Peers | None = getattr(dask_worker.plugins.get(plugin), "peers", None)
    if peers is None:
        return None
    peers.open(**identity)
    return peers.identity

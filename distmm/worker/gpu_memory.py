"""Preload of GPU workers: wait until the memory that their pool takes is free.

A worker that follows one that was killed starts within a few seconds; the driver may need longer to take the memory of
the dead process back. A pool that finds too little ends the worker, and the nanny does not start another one.
"""

from __future__ import annotations

import asyncio
import logging
import time

from distributed import Worker
from distributed.diagnostics import nvml

__all__ = ["dask_setup"]

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0

POLL_SECONDS = 0.1


async def dask_setup(worker: Worker) -> None:
    """Wait for the memory of the worker's pool. Dask calls it before the plugins of the worker, of which one makes it.

    Raises
    ------
    MemoryError
        If the memory is not free in time.
    """
    wanted = max((_pool_bytes(plugin) for plugin in worker._pending_plugins), default=0)
    if not wanted:
        return
    ends = time.monotonic() + PATIENCE_SECONDS
    while (free := _free_bytes()) < wanted:
        if time.monotonic() > ends:
            raise MemoryError(
                f"the pool of worker {worker.name} takes {wanted / 1e9:.1f} GB, and {free / 1e9:.1f} GB of the GPU is "
                f"free: another process has the rest (nvidia-smi lists it); end it, or ask for a smaller pool"
            )
        await asyncio.sleep(POLL_SECONDS)


def _pool_bytes(plugin: object) -> int:
    """Bytes of the pool that a plugin of dask-cuda is going to make."""
    size = getattr(plugin, "initial_pool_size", None)
    if size is None:
        return 0
    from dask_cuda.utils import parse_device_bytes

    return int(parse_device_bytes(size, alignment_size=256))


def _free_bytes() -> int:
    """Bytes of the GPU that nobody uses, by NVML, which needs no context."""
    return int(nvml.one_time()["memory-total"] - nvml.real_time()["memory-used"])

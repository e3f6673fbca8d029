"""The memory pool of a GPU worker: its size, and a preload that waits until the memory for it is free.

A worker that replaces a killed one starts within a few seconds; the driver may need longer to take back the memory of
the dead process. If the pool finds too little memory the worker ends, and its nanny does not start another one. The
error says how much is missing.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any

from distmm import units
from distmm.worker.dask_internals import pending_plugins

if TYPE_CHECKING:
    from distributed import Worker

PATIENCE_SECONDS = 30.0

POLL_SECONDS = 0.1

# The pool's size is a multiple of CUDA's large pages. To map a pool of 112 GB of another size takes another process 0.4
# to 3 s in place of 0.014, because the driver then maps small pages (H200, two and four processes).
PAGE = 2 << 20


async def dask_setup(worker: Worker) -> None:
    """Wait for the memory of the worker's pool. Dask calls this before it sets up the plugin that makes the pool.

    If the memory is not free in time, the plugin's setup raises a MemoryError, and the worker does not start. Dask only
    logs an error of a preload.
    """
    pool: Any = max(pending_plugins(worker), key=_wanted_bytes, default=None)
    wanted = _wanted_bytes(pool) // PAGE * PAGE
    if not wanted:
        return
    pool.initial_pool_size = wanted
    ends = time.monotonic() + PATIENCE_SECONDS
    while (free := _free_bytes()) < wanted:
        if time.monotonic() > ends:
            error = MemoryError(
                f"the pool of worker {worker.name} takes {units.size(wanted)}, and {units.size(free)} of the GPU is "
                f"free: another process has the rest (nvidia-smi lists it); end it, or ask for a smaller pool, of a "
                f"local cluster by DASK_DISTMM__GPU_POOL=8GB, of a worker that you start by --rmm-pool-size 8GB"
            )
            pool.setup = functools.partial(_fail, error)
            return
        await asyncio.sleep(POLL_SECONDS)


def _fail(error: Exception, worker: Worker) -> None:
    raise error


def _wanted_bytes(plugin: object) -> int:
    """Bytes of the pool that a plugin of dask-cuda is going to make."""
    size = getattr(plugin, "initial_pool_size", None)
    if size is None:
        return 0
    from dask_cuda.utils import parse_device_bytes

    return int(parse_device_bytes(size, alignment_size=256))


def _free_bytes() -> int:
    """Free bytes of the GPU as NVML reports them, which needs no CUDA context."""
    from distributed.diagnostics import nvml

    return int(nvml.one_time()["memory-total"] - nvml.real_time()["memory-used"])


def pool_bytes() -> int | None:
    """Size of RMM's pool on this GPU; None where CuPy allocates from the device itself."""
    try:
        import rmm
    except ImportError:
        return None
    resource = rmm.mr.get_current_device_resource()
    while not hasattr(resource, "pool_size") and hasattr(resource, "upstream_mr"):
        resource = resource.upstream_mr  # below the adaptors that log or count allocations
    return int(resource.pool_size()) if hasattr(resource, "pool_size") else None

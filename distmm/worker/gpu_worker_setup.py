"""How GPU workers are set up: one place for local clusters, Slurm scripts, Kubernetes manifests and their texts.

One worker a GPU, each with `THREADS` slots and a memory pool of RMM that CuPy allocates from too.
"""

from __future__ import annotations

from typing import Any

# Slots: tasks that a worker runs at a time. One product runs, the next one is queued, and the third task loads or
# stores blocks.
THREADS = 3

# Share of the GPU's memory in the pool, unless the user asks for another one (``distmm.gpu-pool``). The rest is for
# cuBLAS, kernel code, the transport and the CUDA context, which the pool does not serve.
POOL_FRACTION = 0.8

# Libraries that allocate from the pool.
POOL_USERS = "cupy"

# Bytes of GPU memory above which dask-cuda would copy blocks to the host; 0: never, because the plan bounds the memory.
SPILL_LIMIT = 0

# Module that has a worker wait until the memory of its pool is free.
PRELOAD = "distmm.worker.gpu_memory"

# Environment variables of processes that use UCX. ucxx (0.52) sets this one itself, to the same value, but after it has
# loaded UCX, which has then not read it and warns at each start.
ENVIRONMENT = {"UCX_MEMTYPE_CACHE": "n"}


def cluster_arguments(pool: float | str = POOL_FRACTION) -> dict[str, Any]:
    """Return arguments of ``dask_cuda.LocalCUDACluster``.

    Parameters
    ----------
    pool : float or str
        Share of the GPU's memory in the pool, or a size such as ``"8GB"``.
    """
    return {
        "threads_per_worker": THREADS,
        # A pool, not rmm_async: CUDA IPC cannot share the asynchronous allocator's memory (0.2 instead of 250 GB/s).
        "rmm_pool_size": pool,
        "rmm_allocator_external_lib_list": POOL_USERS,
        "device_memory_limit": SPILL_LIMIT,
        "preload": [PRELOAD],
    }


def worker_options() -> tuple[str, ...]:
    """Return the same as options of ``dask cuda worker``, except its number of threads."""
    return (
        *("--rmm-pool-size", str(POOL_FRACTION)),
        *("--set-rmm-allocator-for-libs", POOL_USERS),
        *("--device-memory-limit", str(SPILL_LIMIT)),
        *("--preload", PRELOAD),
    )

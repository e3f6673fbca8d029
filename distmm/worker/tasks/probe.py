"""What a worker tells the planner about itself."""

from __future__ import annotations

import importlib.util
import os
import time
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distmm.all_workers import owns_gpu
from distmm.planning.precision import Precision
from distmm.transfer import block_memory
from distmm.worker.gpu_memory import pool_bytes
from distmm.worker.tasks.kernel_choice import KernelChoice, kernel_facts

if TYPE_CHECKING:
    from distributed import Worker

# Fraction of a worker's memory limit at which Dask pauses it, unless distributed.worker.memory.pause is lower.
PAUSE_FRACTION = 0.8

# Least bytes that count for a CPU worker without blocks; Python, Dask, distmm and buffers of BLAS take 160 MB. With
# this minimum, a plan that is made before the workers start has the same figure.
WORKER_BYTES = 200_000_000

# Least memory limit of a worker. Dask kills a worker at 95 % of its limit: with a limit of 100 MB a worker was killed
# before its first task, because of its imports. A plan has 80 % of the limit without the `WORKER_BYTES`.
LEAST_MEMORY = 300_000_000

# Bytes of each copy of `copy_rate`, 3 ms over PCIe 5, and seconds of all copies. Workers begin within some 10 ms.
BLOCK_BYTES, COPYING_SECONDS = 1 << 27, 0.15


def probe(
    gpus: Literal["none", "own", "any"],
    dtype: np.dtype,
    precision: Precision,
    kernel: str | None,
    reproducible: bool,
    dask_worker: Worker,
) -> dict[str, Any]:
    """Tell what this worker can do: device, free bytes for blocks, threads, kernels. Called by ``client.run``.

    A worker of dask-cuda owns one GPU; any other worker would only share one by accident, and counts as a CPU worker
    unless `gpus` is "any".
    """
    import psutil

    threads, limit = dask_worker.state.nthreads, dask_worker.memory_manager.memory_limit
    block_memory.blocks.freed.clear()
    rss = psutil.Process().memory_info().rss
    gpu: dict[str, Any] = {"problem": "it was not started by dask-cuda"}
    if gpus == "any" or (gpus == "own" and owns_gpu(dask_worker)):
        gpu = local_gpu()
        if "problem" not in gpu:
            held = 0 if pool_bytes() is None else dask_worker.state.nbytes  # free bytes do not include them
            memory, host = gpu["memory"] - held, max(0, limit - rss) if limit else None
            spills_at = getattr(getattr(dask_worker.data, "device_buffer", None), "n", None)  # of dask-cuda
            more = {"memory": memory, "host_memory": host, "threads": threads, "spills_at": spills_at}
            return {**gpu, **more, **kernel_facts(KernelChoice("cuda", dtype, precision, kernel), reproducible)}
    # New blocks cannot use the memory above Dask's limit for a pause, the memory of the interpreter and its libraries,
    # and the memory of the blocks that the worker holds.
    share = min(PAUSE_FRACTION, dask_worker.memory_manager.memory_pause_fraction or PAUSE_FRACTION)
    memory = int(share * limit) - max(rss, WORKER_BYTES) if limit else psutil.virtual_memory().available
    # Dask's nannies set one thread for BLAS; jobs under Slurm and on Kubernetes set more where a worker has more cores.
    cores = cores_of(threads, os.environ.get("OMP_NUM_THREADS", "1"))
    more = {"device": "cpu", "memory": max(0, memory), "threads": threads, "cores": cores}
    return {**gpu, **more, **kernel_facts(KernelChoice("cpu", dtype, precision, kernel), reproducible)}


def cores_of(threads: int, blas: str) -> int:
    """Return how many cores the kernels of a CPU worker use, by its threads and by BLAS's ``OMP_NUM_THREADS``."""
    return max(threads, min(threads * int(blas) if blas.isdigit() else threads, os.cpu_count() or 1))


def local_gpu() -> dict[str, Any]:
    """Return this process's GPU with its bytes for blocks, or under "problem" why there is none."""
    from distmm_kernels import device

    if device.current().kind != "cuda":
        return {"problem": device.why_no_gpu()}
    import cupy

    free, total = cupy.cuda.Device().mem_info
    cached = cupy.get_default_memory_pool().free_bytes()  # freed blocks, where RMM has no pool
    memory = pool_bytes() or int(free) + cached
    return {"device": "cuda", "threads": 1, "memory": memory, "total": total, "ucx": _has_ucx()}


@cache
def _has_ucx() -> bool:
    """Whether UCX is installed for Dask's messages: a search of all paths, which takes as long as a small product."""
    return importlib.util.find_spec("ucxx") is not None


def copy_rate() -> float:
    """Return the bytes/s at which this process's GPU copies pinned host memory."""
    import cupy

    on_host, on_gpu = cupy.cuda.PinnedMemory(BLOCK_BYTES), cupy.empty(BLOCK_BYTES, "u1")
    stream, copies = cupy.cuda.Stream(non_blocking=True), 0
    started = time.perf_counter()
    while (seconds := time.perf_counter() - started) < COPYING_SECONDS or not copies:
        on_gpu.data.copy_from_host_async(on_host.ptr, BLOCK_BYTES, stream)
        stream.synchronize()
        copies += 1
    return copies * BLOCK_BYTES / seconds

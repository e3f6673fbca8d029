"""`dask.array`: from_zarr, matmul, to_zarr on a cluster of this host as it comes, with CuPy blocks on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import zarr
from distributed import Client, LocalCluster

from .task import Task

# Of a GPU's memory, for RMM's pool, which CuPy is given too: more than the 0.8 from which dask-cuda moves blocks out.
POOL = 0.9


@contextmanager
def program(task: Task) -> Iterator[Callable[[], None]]:
    """Start a cluster, and yield what multiplies on it."""
    limit = "auto" if task.limit is None else task.limit
    with _cluster(task, memory_limit=limit, local_directory=task.scratch) as cluster, Client(cluster) as client:
        client.wait_for_workers(task.workers)
        yield partial(multiply, task)


def _cluster(task: Task, **limits: Any) -> LocalCluster:
    common: dict[str, Any] = {"n_workers": task.workers, "dashboard_address": None, **limits}
    if task.device == "cpu":
        return LocalCluster(threads_per_worker=task.threads, **common)
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(rmm_pool_size=POOL, rmm_allocator_external_lib_list="cupy", **common)


def multiply(task: Task) -> None:
    """Multiply from disk to disk; C's chunks are its blocks, uncompressed as A's and B's are."""
    A, B = (da.from_zarr(path, chunks=(task.block, task.block)) for path in (task.a, task.b))
    if task.device == "gpu":
        import cupy

        there = partial(da.map_blocks, cupy.asarray, meta=cupy.empty((0, 0), A.dtype))
        back = partial(da.map_blocks, cupy.asnumpy, meta=np.empty((0, 0), A.dtype))
        C = back(da.matmul(there(A), there(B)))
    else:
        C = da.matmul(A, B)
    target = zarr.create_array(task.c, shape=C.shape, chunks=C.chunksize, dtype=C.dtype, compressors=None)
    da.to_zarr(C, target)

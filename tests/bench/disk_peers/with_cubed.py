"""cubed: from_zarr, matmul, to_zarr in local processes, or with CuPy in threads of one process.

cubed plans so that no task takes more than `allowed_mem`, and writes what does not fit one task to `work_dir`. With
CuPy its executor "processes" does not work, as its tests say, and it knows one GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import zarr

from .task import Task

# Tasks at a time on a GPU: one multiplies while others read and write.
GPU_TASKS = 4

# Of the memory of a GPU, for all tasks: the rest is for the CUDA context and cuBLAS.
GPU_SHARE = 0.8


@contextmanager
def program(task: Task) -> Iterator[Callable[[], None]]:
    """Measure what a process takes without data, and yield what multiplies; cubed starts its processes each time."""
    on_gpu = task.device == "gpu"
    if on_gpu:
        os.environ["CUBED_BACKEND_ARRAY_API_MODULE"] = "array_api_compat.cupy"  # read when cubed is imported
        zarr.config.enable_gpu()
    import cubed
    from cubed.runtime.create import create_executor

    host = task.limit or psutil.virtual_memory().total // task.workers
    if on_gpu:
        import cupy

        # cubed compares what tasks may have with the memory of the host.
        allowed = int(GPU_SHARE * min(cupy.cuda.Device().mem_info[1], host)) // GPU_TASKS
        executor = create_executor("threads", {"max_workers": GPU_TASKS})
        spec = cubed.Spec(task.scratch, allowed_mem=allowed, executor=executor)
    else:
        executor = create_executor("processes", {"max_workers": task.workers * task.threads})
        reserved = cubed.measure_reserved_mem(executor, task.scratch)
        spec = cubed.Spec(task.scratch, allowed_mem=host // task.threads, reserved_mem=reserved, executor=executor)
    yield partial(multiply, task, spec)


def multiply(task: Task, spec: Any) -> None:
    """Multiply from disk to disk; C's chunks are its blocks, uncompressed as A's and B's are."""
    import cubed
    import cubed.array_api as xp

    A, B = (cubed.from_zarr(path, spec=spec) for path in (task.a, task.b))
    block = (min(task.block, A.shape[0]),) * 2
    if A.chunksize != block:
        A, B = A.rechunk(block), B.rechunk(block)
    C = xp.matmul(A, B)
    target = zarr.create_array(task.c, shape=C.shape, chunks=C.chunksize, dtype=C.dtype, compressors=None)
    cubed.to_zarr(C, target)

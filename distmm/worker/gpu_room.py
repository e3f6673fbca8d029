"""Room in the GPU's memory: whether an error says that there is none, how much is free, and which tasks may run.

Allocations fail in several ways. CuPy and RMM raise kinds of MemoryError. CUDA's runtime and driver, cuBLAS and Numba
raise their own errors, which are recognised by the name of the status in their text. A launch, the load of a kernel
and pinned buffers need memory, too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from distmm import units
from distmm.worker.gpu_memory import pool_bytes

STATUSES = ("CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED")


def is_full(error: BaseException) -> bool:
    """Whether an error says that memory is full."""
    return isinstance(error, MemoryError) or any(status in str(error) for status in STATUSES)


def empty_pools() -> None:
    """Release the free memory of CuPy's own pools. RMM's pool serves the next allocation from freed memory anyway."""
    cupy = sys.modules.get("cupy")  # if it is not imported, no task has used the GPU
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def figures() -> str:
    """Say how much of the GPU's memory is free, in one clause; nothing without a GPU."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return ""
    with suppress(RuntimeError):  # a GPU that does not answer: the error at hand says why
        free, total = cupy.cuda.runtime.memGetInfo()
        pool = pool_bytes()
        pooled = "" if pool is None else f", {units.size(pool)} of it in this worker's pool"
        return f"the GPU has {units.size(total)}{pooled}; outside of pools {units.size(free)} are free"
    return ""


class Turns:
    """Threads work side by side, or one of them works alone.

    While a thread waits to be alone, no other thread may begin. A thread that works already may begin nested work: it
    could not end otherwise.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = self._waiting = 0
        self._alone = False
        self._here = threading.local()

    @contextmanager
    def turn(self, alone: bool = False) -> Iterator[None]:
        """Work beside other threads, or `alone`. A thread that works already goes on as it does."""
        if getattr(self._here, "working", False):
            yield
            return
        with self._changed:
            self._waiting += alone
            try:
                self._changed.wait_for(lambda: not (self._alone or (self._working if alone else self._waiting)))
            finally:
                self._waiting -= alone
            self._working += 1
            self._alone = alone
        self._here.working = True
        try:
            yield
        finally:
            self._here.working = False
            with self._changed:
                self._working -= 1
                self._alone = False
                self._changed.notify_all()

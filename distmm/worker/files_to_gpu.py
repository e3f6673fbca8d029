"""Reads of files into this worker's GPU: threads read pieces into pinned memory, and the device copies them.

A bfloat16 product needs A and B at 14 GB/s, and the GPU's host link has 55 GB/s. One thread reads files in the page
cache into new memory at only 2 GB/s, and the device copies memory that is not pinned at less than 10 GB/s. Here each
thread reads into memory that exists already, at 4 GB/s or more, and fills one buffer while the device copies another.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from distmm.transfer import process_memory
from distmm.worker import gpu, gpu_copies

# Bytes of a pinned buffer: a chunk of 4096 x 4096 bfloat16 numbers. Each thread has two.
BUFFER = 32 << 20


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(process_memory.THREADS, thread_name_prefix="distmm-read")


_local = threading.local()


def _next_buffer() -> tuple[Any, Any]:
    """Return one of this thread's two pinned buffers, and the event that ends the last copy from it."""
    if not hasattr(_local, "buffers"):
        _local.buffers = gpu_copies.pinned_pair(BUFFER)
    _local.buffers.reverse()
    return _local.buffers[0]


def is_file(source: Any) -> bool:
    """Whether an array-like is a matrix of `distmm.storage`, which threads read in pieces."""
    return hasattr(source, "pieces") and hasattr(source, "read_into")


def upload(source: Any, index: tuple[slice, ...]) -> Any:
    """Read a region of a matrix into GPU memory, as a CuPy array in C order where it is read in pieces.

    Parameters
    ----------
    source : Matrix
        Of `distmm.storage.matrix`, a layer above this one.
    index : tuple of slice

    Raises
    ------
    InputError
        Where the data cannot be read.
    """
    import cupy

    if len(source.shape) != 2:
        return cupy.asarray(source[index])
    rows, cols = (slice(*part.indices(size)) for part, size in zip(index, source.shape, strict=True))
    pieces = source.pieces(rows, cols, BUFFER) if rows.step == cols.step == 1 else None
    if not pieces or any((j.stop - j.start) * source.dtype.itemsize > BUFFER for _, j in pieces):
        return cupy.asarray(source[rows, cols])
    number = cupy.cuda.runtime.getDevice()
    with gpu.working("upload") as stream:
        block = cupy.empty((rows.stop - rows.start, cols.stop - cols.start), source.dtype)

        def read(piece: tuple[slice, slice]) -> None:
            i, j = piece
            with cupy.cuda.Device(number):
                buffer, copied = _next_buffer()
                copied.synchronize()
                staged: np.ndarray = np.ndarray((i.stop - i.start, j.stop - j.start), source.dtype, buffer)
                source.read_into(i, j, staged)
                target = block[i.start - rows.start : i.stop - rows.start, j.start - cols.start : j.stop - cols.start]
                gpu_copies.copy_rows(target, staged.ctypes.data, staged.strides[0], stream)
                copied.record(stream)

        process_memory.in_threads(_readers(), read, pieces)
    source.check(rows, cols)
    return block

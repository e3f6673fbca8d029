"""Checksums of the frames of a message: bytes in host memory, or in the memory of a GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from distributed.utils import nbytes

from distmm.transfer.crc32c import crc32c
from distmm.transfer.row_sums import row_sums

# Messages of fewer bytes get no checksum; blocks of large products are larger.
SMALLEST = 256

# Bytes of a row whose words are summed on a GPU. The CRC-32C of these sums is computed on the host.
ROW = 2**15

# Priority of a stream; a lower number is a higher priority. CUDA replaces it by the highest priority that the GPU has.
HIGHEST = -100


def on_host(frames: list[Any]) -> int | None:
    """Return the CRC-32C of frames in host memory; None for small ones."""
    if sum(map(nbytes, frames)) < SMALLEST:
        return None
    crc = 0
    for frame in filter(nbytes, frames):
        crc = crc32c(np.frombuffer(frame, np.uint8), crc)
    return crc


def on_gpu(frames: list[Any]) -> int | None:
    """Return the CRC-32C of the row sums of a frame in GPU memory; None for small ones and unaligned addresses.

    The kernel runs on a stream of high priority: it begins when the product that runs now has ended, before the next
    one. The calling thread waits for it. Dask calls this in a thread beside its event loop, for blocks of more than 10
    MB.
    """
    import cupy

    (frame,) = map(cupy.asarray, frames)
    if frame.nbytes < SMALLEST or frame.data.ptr % 8:
        return None
    stream = _stream(cupy.cuda.runtime.getDevice())
    with stream:
        stream.wait_event(cupy.cuda.Stream.null.record())  # other libraries may have made the block there
        whole = frame.nbytes // ROW * ROW
        parts = frame[:whole].reshape(-1, ROW), frame[whole:].reshape(1, -1)
        sums = [row_sums(part).get() for part in parts if part.size]
    return crc32c(np.concatenate(sums).view(np.uint8))


@functools.cache
def _stream(device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True, priority=HIGHEST)

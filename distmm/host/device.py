"""From the client's memory to this worker's GPU and back, on streams of their own, beside the products.

Pinned memory the GPU reads and writes by itself. Any other goes through two pinned buffers a thread: while the device
copies one, threads fill or empty the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from distmm import gpu
from distmm.host import attach, segments
from distmm.host.lent import Lent, whole

__all__ = ["download", "fetch", "upload"]

# Bytes of a staging buffer: the device takes 1.2 ms for it, a hundred times what it takes to start a copy.
STAGE = 64 << 20

MOST_PITCH = 2**31 - 1  # bytes from row to row that cudaMemcpy2D takes


def upload(part: Lent) -> Any:
    """Return a CuPy copy of a part of the client's array, in its order."""
    import cupy

    flat, swapped = part.by_rows()
    with gpu.working("upload") as stream:
        block = cupy.empty(flat.shape, flat.dtype)
        for host, device in _matrices(flat, block):
            if _is_pinned(host):
                _to_device(device, _pinned(host), host.strides[0], stream)
                continue
            for rows, place, staged, idle in _in_turn(host):
                idle.synchronize()  # the device has taken what was in the buffer
                attach.read(rows.pid, rows.rows(), staged.ctypes.data)
                _to_device(device[place], staged.ctypes.data, staged.strides[0], stream)
                idle.record(stream)
    return block.swapaxes(-1, -2) if swapped else block


def download(part: Lent, block: Any) -> None:
    """Copy a CuPy block into a part of the client's array."""
    import cupy

    if block.shape != part.shape:
        raise ValueError(f"a block of shape {block.shape} does not go into {part.shape}")
    flat, swapped = part.by_rows()
    with gpu.working("download") as stream:
        block = cupy.ascontiguousarray(block.swapaxes(-1, -2) if swapped else block).astype(flat.dtype, copy=False)
        for host, device in _matrices(flat, block):
            if _is_pinned(host):
                _to_host(_pinned(host), host.strides[0], device, stream)
                continue
            waiting = None
            for rows, place, staged, full in _in_turn(host):
                _to_host(staged.ctypes.data, staged.strides[0], device[place], stream)
                full.record(stream)
                if waiting is not None:  # the rows before, while the device copies these
                    _write(*waiting)
                waiting = rows, staged, full
            if waiting is not None:
                _write(*waiting)


def fetch(block: Any) -> np.ndarray:
    """Return a NumPy copy of a CuPy block."""
    out = np.empty(block.shape, block.dtype)
    if out.ndim < 2 or out.nbytes < STAGE:
        block.get(out=out)
    else:
        download(whole(out), block)
    return out


def _matrices(host: Lent, device: Any) -> Iterator[tuple[Lent, Any]]:
    """Pair the matrices of a stack in the client's memory and in GPU memory; none if they are empty."""
    for index in np.ndindex(host.shape[:-2]) if host.nbytes else ():
        offset = sum(i * s for i, s in zip(index, host.strides, strict=False))
        matrix = replace(host, address=host.address + offset, shape=host.shape[-2:], strides=host.strides[-2:])
        yield matrix, device[index]


def _is_pinned(host: Lent) -> bool:
    """Whether the device may copy it by itself: its rows are in a segment, ascending, as far apart as CUDA allows."""
    width = host.shape[1] * host.dtype.itemsize
    return host.segment is not None and (host.shape[0] == 1 or width <= host.strides[0] <= MOST_PITCH)


def _pinned(host: Lent) -> int:
    """Where memory of a segment lies in this process."""
    assert host.segment is not None
    return segments.pinned(host.segment) + host.address - host.segment.address


def _to_device(device: Any, source: int, pitch: int, stream: Any) -> None:
    """Start the copy of a matrix whose rows lie `pitch` bytes apart in pinned memory."""
    from cupy.cuda import runtime

    rows, width = device.shape[0], device.shape[1] * device.itemsize
    pitch = pitch if rows > 1 else width  # the stride of a single row means nothing
    runtime.memcpy2DAsync(device.data.ptr, width, source, pitch, width, rows, runtime.memcpyHostToDevice, stream.ptr)


def _to_host(target: int, pitch: int, device: Any, stream: Any) -> None:
    """Start the copy of a matrix to rows that lie `pitch` bytes apart in pinned memory."""
    from cupy.cuda import runtime

    rows, width = device.shape[0], device.shape[1] * device.itemsize
    pitch = pitch if rows > 1 else width
    runtime.memcpy2DAsync(target, pitch, device.data.ptr, width, width, rows, runtime.memcpyDeviceToHost, stream.ptr)


_local = threading.local()


def _in_turn(host: Lent) -> Iterator[tuple[Lent, slice, np.ndarray, Any]]:
    """Cut a matrix into ranges of rows, each with one of this thread's two pinned buffers and an event for it."""
    import cupy

    width = host.shape[1] * host.dtype.itemsize
    if getattr(_local, "size", 0) < max(STAGE, width):
        _local.size = max(STAGE, width)
        _local.buffers = [
            (cupy.cuda.alloc_pinned_memory(_local.size), cupy.cuda.Event(block=True, disable_timing=True))
            for _ in range(2)
        ]
    height = max(1, STAGE // width)
    for turn, first in enumerate(range(0, host.shape[0], height)):
        place = slice(first, first + height)
        rows = host.part((place, slice(None)))
        buffer, event = _local.buffers[turn % 2]
        yield rows, place, np.ndarray(rows.shape, rows.dtype, buffer), event


def _write(rows: Lent, staged: np.ndarray, full: Any) -> None:
    full.synchronize()
    attach.write(rows.pid, rows.rows(), staged.ctypes.data)

"""From the client's memory to this worker's GPU and back, on streams of their own, beside the products.

Pinned memory the GPU reads and writes by itself. Any other goes through two pinned buffers a block: while the device
copies one, threads fill or empty the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from distmm.transfer import process_memory, shared_memory
from distmm.transfer.client_array import Lent, whole
from distmm.worker import gpu

__all__ = ["download", "fetch", "pieces", "upload"]

# Bytes of a staging buffer: the device takes 1.2 ms for it, a hundred times what it takes to start a copy.
STAGE = 64 << 20

MOST_PITCH = 2**31 - 1  # bytes from row to row that cudaMemcpy2D takes


def upload(part: Lent) -> Any:
    """Return a CuPy copy of a part of the client's array, in its order."""
    import cupy

    flat, swapped = part.by_rows()
    with _buffers(flat) as buffers, gpu.working("upload") as stream:
        block = cupy.empty(flat.shape, flat.dtype)
        for host, device in _matrices(flat, block):
            if not buffers:
                _to_device(device, _pinned(host), host.strides[0], stream)
                continue
            for rows, place, staged, idle in _in_turn(host, buffers):
                idle.synchronize()  # the device has taken what was in the buffer
                process_memory.read(rows.pid, rows.rows(), staged.ctypes.data)
                _to_device(device[place], staged.ctypes.data, staged.strides[0], stream)
                idle.record(stream)
    return block.swapaxes(-1, -2) if swapped else block


def download(part: Lent, block: Any) -> None:
    """Copy a CuPy block into a part of the client's array."""
    import cupy

    if block.shape != part.shape:
        raise ValueError(f"a block of shape {block.shape} does not go into {part.shape}")
    flat, swapped = part.by_rows()
    with _buffers(flat) as buffers, gpu.working("download") as stream:
        block = cupy.ascontiguousarray(block.swapaxes(-1, -2) if swapped else block).astype(flat.dtype, copy=False)
        for host, device in _matrices(flat, block):
            if not buffers:
                _to_host(_pinned(host), host.strides[0], device, stream)
                continue
            waiting = None
            for rows, place, staged, full in _in_turn(host, buffers):
                _to_host(staged.ctypes.data, staged.strides[0], device[place], stream)
                full.record(stream)
                if waiting is not None:  # the rows before, while the device copies these
                    _write(*waiting)
                waiting = rows, staged, full
            if waiting is not None:
                _write(*waiting)


def pieces(block: np.ndarray) -> Iterator[Any]:
    """Yield some rows after the other of a block ``(m, n)`` in host memory, as CuPy arrays."""
    height = max(1, STAGE // max(1, block.shape[1] * block.itemsize))
    for first in range(0, len(block), height):
        yield upload(whole(block[first : first + height]))


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
    width = host.shape[-1] * host.dtype.itemsize
    return host.segment is not None and (host.shape[-2] == 1 or width <= host.strides[-2] <= MOST_PITCH)


def _pinned(host: Lent) -> int:
    """Where memory of a segment lies in this process."""
    assert host.segment is not None
    return shared_memory.pinned(host.segment) + host.address - host.segment.address


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


Buffers = list[tuple[Any, Any]]  # two pinned buffers, and for each the event of the copy that was last asked for

_idle: list[Buffers] = []


@contextmanager
def _buffers(host: Lent) -> Iterator[Buffers]:
    """Lend two pinned buffers, or none for what is pinned; to be entered before the stream, which waits at its end.

    They are kept for the next block: tasks that leave their slots run in new threads.
    """
    if _is_pinned(host):
        yield []
        return
    import cupy

    try:
        pair = _idle.pop()
    except IndexError:
        pair = [
            (cupy.cuda.alloc_pinned_memory(STAGE), cupy.cuda.Event(block=True, disable_timing=True)) for _ in range(2)
        ]
    try:
        yield pair
    finally:
        _idle.append(pair)


def _in_turn(host: Lent, buffers: Buffers) -> Iterator[tuple[Lent, tuple[slice, slice], np.ndarray, Any]]:
    """Cut a matrix into ranges of rows, or parts of long ones, each with one of the buffers and its event."""
    width = min(host.shape[1], STAGE // host.dtype.itemsize)
    height = max(1, STAGE // (width * host.dtype.itemsize))
    places = itertools.product(range(0, host.shape[0], height), range(0, host.shape[1], width))
    for turn, (row, column) in enumerate(places):
        place = slice(row, row + height), slice(column, column + width)
        part = host.part(place)
        buffer, event = buffers[turn % 2]
        yield part, place, np.ndarray(part.shape, part.dtype, buffer), event


def _write(rows: Lent, staged: np.ndarray, full: Any) -> None:
    full.synchronize()
    process_memory.write(rows.pid, rows.rows(), staged.ctypes.data)

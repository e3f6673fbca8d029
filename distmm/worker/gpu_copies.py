"""Copies between the client's memory and this worker's GPU, on separate streams, while products run.

The GPU reads and writes pinned memory by itself. Blocks in other memory go through two pinned staging buffers each:
while the device copies one, threads fill or empty the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distmm.transfer import gpu_allocations, shared_memory
from distmm.transfer.client_array import MOST_PITCH, ClientArray, check_marks
from distmm.worker import gpu

if TYPE_CHECKING:
    import dask.array as da

# Bytes of a staging buffer: the device copies it in 1.2 ms, a hundred times as long as the start of a copy takes.
STAGE = 64 << 20

Buffers = list[tuple[Any, Any]]  # two pinned buffers, and for each the event of its last copy


def upload(part: ClientArray) -> Any:
    """Return a CuPy copy of a part of the client's array, in its order; a view of GPU memory of this process.

    Raises
    ------
    OSError, InputError
        If the process that owns the array has ended, or has freed it.
    """
    if part.on_gpu and (view := part.local_view()) is not None:
        return view
    return copies([part])[0]


def copies(parts: Sequence[ClientArray]) -> list[Any]:
    """Return CuPy copies of arrays of one process, or of parts of them, in their order; raises like `upload`."""
    flat = [part.with_contiguous_rows() for part in parts]
    few = [each.merged() for each, _ in flat]
    with ExitStack() as reserved:
        shifts = [reserved.enter_context(_reached(each)) for each in few]
        buffers = reserved.enter_context(_buffers(None not in shifts))
        with gpu.working("upload") as stream:
            blocks = [_enqueued(*each, buffers, stream) for each in zip(flat, few, shifts, strict=True)]
    check_marks([part for part in parts if part.on_gpu])
    return blocks


def _enqueued(
    flat: tuple[ClientArray, bool], few: ClientArray, shift: int | None, buffers: Buffers, stream: Any
) -> Any:
    """Start the copy of one array: with contiguous rows, and in few dimensions; return the block."""
    import cupy

    block = cupy.empty(flat[0].shape, gpu.carrier(flat[0].dtype))
    for host, device in _matrices(few, block.reshape(few.shape)):
        if shift is not None:
            copy_rows(device, host.address + shift, host.strides[0], stream)
            continue
        for rows, region, staged, idle in _staged(host, buffers):
            idle.synchronize()  # the device has copied the earlier contents of the buffer
            rows.read_into(staged)
            copy_rows(device[region], staged.ctypes.data, staged.strides[0], stream)
            idle.record(stream)
    return block.swapaxes(-1, -2) if flat[1] else block


def download(part: ClientArray, block: Any) -> None:
    """Copy a CuPy block into a part of the client's array."""
    if block.shape != part.shape:
        raise ValueError(f"a block of shape {block.shape} does not go into {part.shape}")
    gpu.retrying(partial(_download, part, block), "a block on its way to the host", block.nbytes)


def _download(part: ClientArray, block: Any) -> None:
    import cupy

    flat, swapped = part.with_contiguous_rows()
    few = flat.merged()
    with _reached(few) as shift, _buffers(shift is not None) as buffers, gpu.working("download") as stream:
        block = cupy.ascontiguousarray(block.swapaxes(-1, -2) if swapped else block).astype(flat.dtype, copy=False)
        for host, device in _matrices(few, block.reshape(few.shape)):
            if shift is not None:
                copy_rows(device, host.address + shift, host.strides[0], stream, to_host=True)
                continue
            last = None
            for rows, region, staged, full in _staged(host, buffers):
                copy_rows(device[region], staged.ctypes.data, staged.strides[0], stream, to_host=True)
                full.record(stream)
                if last is not None:  # the rows before these, while the device copies these
                    _write(*last)
                last = rows, staged, full
            if last is not None:
                _write(*last)


def pieces(block: np.ndarray) -> Iterator[Any]:
    """Yield a block ``(m, n)`` of host memory as CuPy arrays of some rows each, from the first row to the last."""
    height = max(1, STAGE // max(1, block.shape[1] * block.itemsize))
    for first in range(0, len(block), height):
        yield upload(ClientArray.of(block[first : first + height]))


def to_host(block: Any) -> Any:
    """Return a NumPy copy of a CuPy block, a scalar if it has no dimensions; a NumPy block as it is."""
    if not (hasattr(block, "get") and hasattr(block, "__cuda_array_interface__")):
        return block
    out = np.empty(block.shape, block.dtype)
    if out.ndim < 2 or out.nbytes < STAGE:
        block.get(out=out)
    else:
        download(ClientArray.of(out), block)
    return out if out.ndim else out[()]


def blocks_to_host(array: da.Array) -> da.Array:
    """Return a lazy array with its blocks copied to host memory."""
    return array.map_blocks(to_host, dtype=array.dtype, meta=np.empty((0,) * array.ndim, array.dtype))


def _matrices(host: ClientArray, device: Any) -> Iterator[tuple[ClientArray, Any]]:
    """Yield each matrix of a stack, in the client's memory and in GPU memory; nothing if they are empty."""
    for index in np.ndindex(host.shape[:-2]) if host.nbytes else ():
        offset = sum(i * s for i, s in zip(index, host.strides, strict=False))
        matrix = replace(host, address=host.address + offset, shape=host.shape[-2:], strides=host.strides[-2:])
        yield matrix, device[index]


@contextmanager
def _reached(host: ClientArray) -> Iterator[int | None]:
    """Yield the distance from addresses in the owner to addresses by which this GPU reaches the array by itself.

    None if it does not: it reaches memory of GPUs, and rows of a segment in ascending order, with a pitch that CUDA
    accepts.
    """
    width = host.shape[-1] * host.dtype.itemsize
    if isinstance(host.segment, gpu_allocations.Allocation):
        with gpu_allocations.mapped(host.segment) as address:
            yield address - host.segment.address
    elif host.segment is not None and (host.shape[-2] == 1 or width <= host.strides[-2] <= MOST_PITCH):
        yield shared_memory.pinned(host.segment) - host.segment.address
    else:
        yield None


def copy_rows(device: Any, address: int, pitch: int, stream: Any, to_host: bool = False) -> None:
    """Start the copy of a matrix to the GPU, or `to_host`: other rows lie `pitch` bytes apart in pinned or GPU memory.

    Elements of a row are contiguous on both sides.
    """
    from cupy.cuda import runtime

    rows, width = device.shape[0], device.shape[1] * device.itemsize
    pitches = (device.strides[0], pitch) if rows > 1 else (width, width)  # the stride of a single row is not used
    sides = list(zip((device.data.ptr, address), pitches, strict=True))
    target, source = sides[::-1] if to_host else sides
    runtime.memcpy2DAsync(*target, *source, width, rows, runtime.memcpyDefault, stream.ptr)


_idle: list[Buffers] = []


def pinned_pair(nbytes: int) -> Buffers:
    """Return two pinned buffers of so many bytes."""
    import cupy

    events = (cupy.cuda.Event(block=True, disable_timing=True) for _ in range(2))
    return [(cupy.cuda.alloc_pinned_memory(nbytes), event) for event in events]


@contextmanager
def _buffers(reached: bool) -> Iterator[Buffers]:
    """Reserve two pinned staging buffers; none for memory that the GPU reaches (`_reached`).

    Enter this context before that of the stream: the stream's end waits for the copies from and to the buffers.

    The buffers are kept for the next block, but not per thread: tasks that release their slots run in new threads.
    """
    if reached:
        yield []
        return
    try:
        pair = _idle.pop()
    except IndexError:
        pair = pinned_pair(STAGE)
    try:
        yield pair
    finally:
        _idle.append(pair)


def _staged(host: ClientArray, buffers: Buffers) -> Iterator[tuple[ClientArray, tuple[slice, slice], np.ndarray, Any]]:
    """Cut a matrix into ranges of rows, or parts of long rows, and give each a buffer, in turn, and its event."""
    width = min(host.shape[1], STAGE // host.dtype.itemsize)
    height = max(1, STAGE // (width * host.dtype.itemsize))
    corners = itertools.product(range(0, host.shape[0], height), range(0, host.shape[1], width))
    for turn, (row, column) in enumerate(corners):
        region = slice(row, row + height), slice(column, column + width)
        part = host.part(region)
        buffer, event = buffers[turn % 2]
        yield part, region, np.ndarray(part.shape, part.dtype, buffer), event


def _write(rows: ClientArray, staged: np.ndarray, full: Any) -> None:
    full.synchronize()
    rows.write_from(staged)

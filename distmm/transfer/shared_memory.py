"""Shared memory segments: `empty` makes them for the user, and workers that own GPUs map and pin them.

Workers without GPUs read a segment like any other memory of the client, without a map. A map would count as memory of
the worker, and Dask pauses and kills workers that use too much memory.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from distmm.all_workers import everywhere, owns_gpu
from distmm.transfer import process_memory

if TYPE_CHECKING:
    from distributed import Client, Worker


@dataclass(frozen=True)
class Segment:
    """A memory file (``memfd_create``) of process `pid`. Other processes open it by that process's descriptor.

    Attributes
    ----------
    pid, fd : int
        Owner, and its file descriptor.
    inode : int
        Identifies the file, since the owner may later use the descriptor for another file.
    address, nbytes : int
        Address in the owner's memory, and size.
    """

    pid: int
    fd: int
    inode: int
    address: int
    nbytes: int

    @property
    def path(self) -> str:
        """Path by which other processes open it."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def is_there(self) -> bool:
        """Whether its owner still has it open."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except OSError:
            return False


_ours: dict[int, Segment] = {}  # segments of this process, by inode


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = float, *, client: Client | None = None) -> np.ndarray:
    """Make an uninitialised NumPy array in memory that the GPU workers of this machine pin and share.

    GPUs copy blocks from and to pinned memory by DMA, several times as fast as other memory. Use it for the operands
    and results of products on a local cluster with GPUs. Slices, transposes and reshaped views of the array share the
    memory.

    Parameters
    ----------
    shape : int or tuple of int
        Shape of the array.
    dtype : data-type
        Type of its elements.
    client : distributed.Client, optional
        Cluster whose workers pin the memory now. By default each worker pins it when it copies its first block.

    Returns
    -------
    numpy.ndarray
        Array of this shape and type. Its memory is freed with the last view of it.

    Examples
    --------
    >>> import distmm
    >>> A = distmm.empty((3, 4), "f4")
    >>> A[:] = 1
    """
    dtype = np.dtype(dtype)
    shape = np.broadcast_shapes(shape)  # of a number, or an array of numbers, too
    nbytes = max(1, math.prod(shape) * dtype.itemsize)
    fd = os.memfd_create("distmm")
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        array: np.ndarray = np.ndarray(shape, dtype, memory)
    except BaseException:
        os.close(fd)
        raise
    segment = Segment(os.getpid(), fd, os.fstat(fd).st_ino, array.ctypes.data, nbytes)
    _ours[segment.inode] = segment
    weakref.finalize(memory, _close, segment)
    process_memory.populate(segment.address, nbytes)
    if client is not None:
        everywhere(client, _pin, segment)
    return array


def _close(segment: Segment) -> None:
    _ours.pop(segment.inode, None)
    os.close(segment.fd)


def behind(array: np.ndarray) -> Segment | None:
    """Return the segment that contains an array of this process; None for other memory."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return next((s for s in list(_ours.values()) if s.address <= low and high <= s.address + s.nbytes), None)


class _Map:
    """A segment that is mapped into this process and page-locked for its GPU."""

    def __init__(self, segment: Segment) -> None:
        from cupy.cuda import runtime

        with open(segment.path, "r+b") as file:
            if os.fstat(file.fileno()).st_ino != segment.inode:
                raise OSError(f"{segment.path} is another file now: its owner has freed the array")
            self.memory = np.frombuffer(mmap.mmap(file.fileno(), segment.nbytes), np.uint8)
        self.address = int(self.memory.ctypes.data)
        runtime.hostRegister(self.address, self.memory.nbytes, 0)
        weakref.finalize(self, runtime.hostUnregister, self.address)


_maps: dict[Segment, _Map] = {}
_mapping = threading.Lock()  # two tasks of a worker may use a new segment at the same time


def pinned(segment: Segment) -> int:
    """Return the address of a segment in this process; the first call maps it and pins it for the process's GPU.

    Raises
    ------
    OSError
        If its owner has ended, or has freed it.
    """
    with _mapping:
        if segment not in _maps:
            _maps[segment] = _Map(segment)
        return _maps[segment].address


def drop_freed() -> None:
    """Unmap segments that their owner has freed. Workers call it every second: a map keeps the memory allocated."""
    with _mapping:
        for segment in [segment for segment in _maps if not segment.is_there()]:
            del _maps[segment]


def _pin(segment: Segment, dask_worker: Worker) -> None:
    if owns_gpu(dask_worker):
        pinned(segment)

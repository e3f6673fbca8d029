"""An array of the client as its workers see it: indexed to read a block, assigned to to write one."""

from __future__ import annotations

import math
import os
import socket
import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from distributed import Client

from distmm.all_workers import everywhere
from distmm.errors import InputError
from distmm.transfer import process_memory, shared_memory
from distmm.transfer.write_lease import Lease
from distmm.worker.worker_slots import beside_products

__all__ = ["TOPIC", "Lent", "has_gaps", "lend", "release", "whole"]

# Smaller arrays (in bytes) travel with the graph: asking the workers what they can reach would take longer.
SMALLEST = 1 << 20

# Topic of Dask's events under which the scheduler names the operands of products that it has forgotten.
TOPIC = "distmm-forgotten"

# Of the blocks that are on their way from the GPU so many are copied at a time.
_storing = threading.BoundedSemaphore(2)


@dataclass(frozen=True)
class Lent:
    """An array, or a part of one, in the memory of process `pid`.

    Attributes
    ----------
    name : str
        Under which its owner keeps it alive; "" if others see to that.
    pid, address
        Where its first element is.
    shape, strides, dtype
        As NumPy's.
    segment : Segment or None
        Shared memory that it lies in.
    proof : tuple of int and bytes
        An address of that process, and the random bytes that are there: who reads these reads that process's memory,
        and not that of another one which has its number on another machine.
    owner : numpy.ndarray or None
        The array; None in other processes.
    lease : Lease or None
        Without it, who writes must know by other means that the memory is still there.
    """

    name: str
    pid: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    segment: shared_memory.Segment | None
    proof: tuple[int, bytes]
    owner: np.ndarray | None = field(default=None, compare=False, repr=False)
    lease: Lease | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.name and self.owner is not None:  # on its way to a cluster, whose tasks may outlive other references
            _kept[self.name] = self.owner
        where = self.name, self.pid, self.address, self.shape, self.strides, self.dtype, self.segment, self.proof
        return type(self), (*where, None, self.lease)

    def __dask_tokenize__(self) -> Any:
        return self.name, self.lease

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read a block: a view in the process that owns it, else a copy."""
        part = self.part(index)
        here = part.here()
        if here is not None:
            return here
        part, swapped = part.by_rows()
        block = np.empty(part.shape, part.dtype)
        if block.size:
            process_memory.read(part.pid, part.rows(), block.ctypes.data)
        return block.swapaxes(-1, -2) if swapped else block

    def __setitem__(self, index: tuple[slice, ...], block: Any) -> None:
        """Write a block of host or GPU memory; with a lease, only while it lasts."""
        part = self.part(index)
        if hasattr(block, "__cuda_array_interface__"):
            from distmm.worker import gpu_copies

            with beside_products("store"), _storing, self._writing():
                gpu_copies.download(part, block)
            return
        here = part.here()
        if here is not None:
            with self._writing():
                here[...] = block
            return
        part, swapped = part.by_rows()
        block = np.ascontiguousarray(np.swapaxes(block, -1, -2) if swapped else block, part.dtype)
        if block.shape != part.shape:
            raise ValueError(f"a block of shape {block.shape} does not go into {part.shape}")
        if block.size:
            with self._writing():
                process_memory.write(part.pid, part.rows(), block.ctypes.data)

    def _writing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.lease is None else self.lease.writing()

    def to_device(self, index: tuple[slice, ...]) -> Any:
        """Read a block into GPU memory, as a CuPy array."""
        from distmm.worker import gpu_copies

        return gpu_copies.upload(self.part(index))

    def part(self, index: tuple[slice, ...]) -> Lent:
        """Return a contiguous range of each dimension.

        Raises
        ------
        InputError
            In a process that cannot reach the array.
        """
        if self.pid != os.getpid():
            _check_reach(self.pid, self.proof)
        ranges = [range(*place.indices(n)) for place, n in zip(index, self.shape, strict=True)]
        if any(r.step != 1 for r in ranges):
            raise IndexError(f"{index}: blocks are ranges of step 1")
        offset = sum(r.start * s for r, s in zip(ranges, self.strides, strict=True))
        return replace(self, address=self.address + offset, shape=tuple(map(len, ranges)))

    def here(self) -> np.ndarray | None:
        """Return it as an array, in the process that owns it and where it is empty."""
        if self.nbytes == 0:
            return np.empty(self.shape, self.dtype)
        if self.pid != os.getpid():
            return None
        layout = {"version": 3, "data": (self.address, False), "shape": self.shape, "strides": self.strides}
        owner = self.owner if self.owner is not None else _kept[self.name] if self.name else None
        view = np.asarray(_Memory(owner, {**layout, "typestr": f"|V{self.dtype.itemsize}"}))
        return view.view(self.dtype)  # in two steps: the interface has no name for bfloat16

    def by_rows(self) -> tuple[Lent, bool]:
        """Return it with its last dimension contiguous, and whether the last two were exchanged for that."""
        if self.strides[-1] == self.dtype.itemsize or self.shape[-1] <= 1:
            return self, False
        swap = (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)
        shape, strides = (tuple(values[d] for d in swap) for values in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides), True

    def rows(self) -> process_memory.Rows:
        """Addresses and bytes of its rows, in row-major order."""
        starts = np.array(self.address, np.int64)
        for n, stride in zip(self.shape[:-1], self.strides[:-1], strict=True):
            starts = starts[..., None] + np.arange(n) * stride
        return starts.ravel(), self.shape[-1] * self.dtype.itemsize


@dataclass(frozen=True)
class _Memory:
    """What NumPy asks for a view, which keeps this object alive and so its memory, unless others see to that."""

    owner: np.ndarray | None
    __array_interface__: dict[str, Any]


_kept: dict[str, np.ndarray] = {}  # arrays that products on the way may still read


def release(names: Iterable[str]) -> None:
    """Keep arrays no longer that were lent under these names; other names are none of ours."""
    for name in names:
        _kept.pop(name, None)


def lend(array: np.ndarray, client: Client, name: str | None = None, writable: bool = False) -> Lent | None:
    """Let the workers of a cluster on this machine use an array of this process.

    Parameters
    ----------
    array : numpy.ndarray of at least two dimensions
        Copied only if neither of its last two dimensions is contiguous.
    client : distributed.Client
    name : str, optional
        Under which the array is kept alive from when it is sent until `release`; by default its owner sees to that.
    writable : bool
        Workers will write to it, so that a copy will not do.

    Returns
    -------
    Lent or None
        None for a small array, one of foreign byte order or (to be written) with gaps between elements; and where a
        worker cannot reach this process's memory: on another machine, of another user, or forbidden by the system. To
        be written, where the system has no file for a `Lease`.
    """
    if array.nbytes < SMALLEST or array.ndim < 2 or not array.dtype.isnative or not _within_reach(client):
        return None
    if writable and not hasattr(os, "memfd_create"):
        return None
    if has_gaps(array):
        if writable:
            return None
        array = np.ascontiguousarray(array)
    return whole(array, name or "")


def has_gaps(array: np.ndarray) -> bool:
    """Whether neither of the last two dimensions is contiguous: such an array cannot be read by rows."""
    return all(s != array.itemsize and n > 1 for s, n in zip(array.strides[-2:], array.shape[-2:], strict=True))


def whole(array: np.ndarray, name: str = "") -> Lent:
    """Describe a whole array of this process."""
    address, secret = array.__array_interface__["data"][0], process_memory.secret()
    where = name, os.getpid(), address, array.shape, array.strides, array.dtype
    return Lent(*where, shared_memory.behind(array), (secret.ctypes.data, secret.tobytes()), owner=array)


@lru_cache(maxsize=64)
def _check_reach(pid: int, proof: tuple[int, bytes]) -> None:
    """Refuse to read or write where another process's memory may be; what is raised is not kept in the cache."""
    if not process_memory.can_read(pid, *proof):
        raise InputError(
            f"an array of process {pid} is out of reach of this worker on {socket.gethostname()}: all workers reached "
            "it when distmm was called, so this one has joined since, from another machine or as another user, or that "
            "process has ended. Call distmm again with the workers that there are now: the array then travels through "
            "the scheduler. Or write it to a file that all of them read, such as a Zarr folder"
        )


_tried: weakref.WeakKeyDictionary[Client, tuple[frozenset[str], bool]] = weakref.WeakKeyDictionary()


def _within_reach(client: Client) -> bool:
    """Whether every worker reaches this process's memory; tried again when there are other workers."""
    workers = frozenset(client.scheduler_info(n_workers=-1)["workers"])
    known = _tried.get(client)
    if known is not None and known[0] == workers:
        return known[1]
    if known is None:
        client.subscribe_topic(TOPIC, lambda event: release(event[1]))
    reached = False
    if process_memory.allow():
        secret = process_memory.secret()
        answers = everywhere(client, process_memory.can_read, os.getpid(), secret.ctypes.data, secret.tobytes())
        reached = bool(answers) and all(answers.values())
    _tried[client] = workers, reached
    return reached

"""An array in the memory of the client's process, as workers on the same machine read and write it.

Indexing reads a block, and assignment writes one. It knows only host memory: `distmm.worker.gpu_copies` copies its
parts to and from GPUs.
"""

from __future__ import annotations

import math
import os
import socket
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

__all__ = ["FORGOTTEN_TOPIC", "ClientArray", "has_gaps", "release", "share"]

# Smaller arrays (in bytes) travel with the graph: asking the workers what they can reach would take longer.
SMALLEST = 1 << 20

# Topic of Dask's events with which the scheduler names the operands of products that it has forgotten.
FORGOTTEN_TOPIC = "distmm-forgotten"


@dataclass(frozen=True)
class ClientArray:
    """An array, or a part of one, in the memory of process `pid`.

    Attributes
    ----------
    name : str
        The owner keeps the array alive under this name; "" if the caller keeps it alive.
    pid, address
        Where its first element is.
    shape, strides, dtype
        As NumPy's.
    segment : Segment or None
        Shared memory that it lies in.
    proof : tuple of int and bytes
        An address in that process, and the random bytes there. Process numbers repeat on other machines: a worker that
        reads these bytes reads that process's memory and no other's.
    owner : numpy.ndarray or None
        The array; None in other processes.
    lease : Lease or None
        Writers hold it. Without a lease, the caller must make sure that the memory is still there.
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

    @classmethod
    def of(cls, array: np.ndarray, name: str = "") -> ClientArray:
        """Describe a whole array of this process."""
        address, secret = array.__array_interface__["data"][0], process_memory.secret()
        where = name, os.getpid(), address, array.shape, array.strides, array.dtype
        return cls(*where, shared_memory.behind(array), (secret.ctypes.data, secret.tobytes()), owner=array)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.name and self.owner is not None:  # sent to a cluster: its tasks may live longer than other references
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

    @property
    def is_local(self) -> bool:
        """Whether its memory is this process's own."""
        return self.pid == os.getpid() and self.proof[1] == process_memory.secret().tobytes()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read a block: a view in the process that owns it, else a copy."""
        part = self.part(index)
        view = part.local_view()
        if view is not None:
            return view
        part, swapped = part.with_contiguous_rows()
        block = np.empty(part.shape, part.dtype)
        part.read_into(block)
        return block.swapaxes(-1, -2) if swapped else block

    def __setitem__(self, index: tuple[slice, ...], block: Any) -> None:
        """Write a block of host memory; with a lease, only while it lasts."""
        part = self.part(index)
        view = part.local_view()
        if view is not None:
            with self.writing():
                view[...] = block
            return
        part, swapped = part.with_contiguous_rows()
        block = np.ascontiguousarray(np.swapaxes(block, -1, -2) if swapped else block, part.dtype)
        if block.shape != part.shape:
            raise ValueError(f"a block of shape {block.shape} does not go into {part.shape}")
        with self.writing():
            part.write_from(block)

    def writing(self) -> AbstractContextManager[None]:
        """Hold the lease, if there is one, while something is written.

        Raises
        ------
        OSError
            If the lease has ended.
        """
        return nullcontext() if self.lease is None else self.lease.writing()

    def part(self, index: tuple[slice, ...]) -> ClientArray:
        """Return a contiguous range of each dimension.

        Raises
        ------
        InputError
            In a process that cannot reach the array.
        """
        if not self.is_local:
            _check_reach(self.pid, self.proof)
        ranges = [range(*part.indices(n)) for part, n in zip(index, self.shape, strict=True)]
        if any(r.step != 1 for r in ranges):
            raise IndexError(f"{index}: blocks are ranges of step 1")
        offset = sum(r.start * s for r, s in zip(ranges, self.strides, strict=True))
        return replace(self, address=self.address + offset, shape=tuple(map(len, ranges)))

    def local_view(self) -> np.ndarray | None:
        """Return it as a NumPy array if this process owns it or it is empty; None otherwise."""
        if self.nbytes == 0:
            return np.empty(self.shape, self.dtype)
        if not self.is_local:
            return None
        layout = {"version": 3, "data": (self.address, False), "shape": self.shape, "strides": self.strides}
        owner = self.owner if self.owner is not None else _kept[self.name] if self.name else None
        view = np.asarray(_Memory(owner, {**layout, "typestr": f"|V{self.dtype.itemsize}"}))
        return view.view(self.dtype)  # in two steps, because the interface has no name for bfloat16

    def with_contiguous_rows(self) -> tuple[ClientArray, bool]:
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

    def read_into(self, target: np.ndarray) -> None:
        """Copy its elements to a C-contiguous array of the same shape; its own rows are contiguous."""
        view = self.local_view()
        if view is not None:
            process_memory.copy(target, view)
        else:
            process_memory.read(self.pid, self.rows(), target.ctypes.data)

    def write_from(self, source: np.ndarray) -> None:
        """Copy a C-contiguous array of the same shape into it; its own rows are contiguous."""
        view = self.local_view()
        if view is not None:
            process_memory.copy(view, source)
        else:
            process_memory.write(self.pid, self.rows(), source.ctypes.data)


@dataclass(frozen=True)
class _Memory:
    """Memory of which NumPy makes a view. The view keeps this object alive, and with it the owner's memory."""

    owner: np.ndarray | None
    __array_interface__: dict[str, Any]


_kept: dict[str, np.ndarray] = {}  # arrays that submitted products may still read


def release(names: Iterable[str]) -> None:
    """Stop keeping the arrays that were shared under these names; unknown names are ignored."""
    for name in names:
        _kept.pop(name, None)


def share(array: np.ndarray, client: Client, name: str | None = None, writable: bool = False) -> ClientArray | None:
    """Let the workers of a cluster on this machine use an array of this process.

    Parameters
    ----------
    array : numpy.ndarray of at least two dimensions
        Copied only if neither of its last two dimensions is contiguous.
    client : distributed.Client
    name : str, optional
        The array is kept alive under this name from when it is sent until `release`; by default the caller does so.
    writable : bool
        Workers will write to it, so a copy is of no use.

    Returns
    -------
    ClientArray or None
        None for an array that is small or of foreign byte order, and where a worker cannot reach this process's memory:
        on another machine, as another user, or because the system forbids it. For an array that is to be written also
        None if it has gaps between elements, or if the system has no file for a `Lease`.
    """
    if array.nbytes < SMALLEST or array.ndim < 2 or not array.dtype.isnative or not _within_reach(client):
        return None
    if writable and not hasattr(os, "memfd_create"):
        return None
    if has_gaps(array):
        if writable:
            return None
        array = np.ascontiguousarray(array)
    return ClientArray.of(array, name or "")


def has_gaps(array: np.ndarray) -> bool:
    """Whether neither of the last two dimensions is contiguous: such an array cannot be read by rows."""
    return all(s != array.itemsize and n > 1 for s, n in zip(array.strides[-2:], array.shape[-2:], strict=True))


@lru_cache(maxsize=64)
def _check_reach(pid: int, proof: tuple[int, bytes]) -> None:
    """Refuse memory that this process cannot reach, or that may belong to another process; errors are not cached."""
    if not process_memory.can_read(pid, *proof):
        raise InputError(
            f"an array of process {pid} is out of reach of this worker on {socket.gethostname()}: all workers reached "
            "it when distmm was called, so this one has joined since, from another machine or as another user, or that "
            "process has ended. Call distmm again with the workers that there are now: the array then travels through "
            "the scheduler. Or write it to a file that all of them read, such as a Zarr folder"
        )


_tried: weakref.WeakKeyDictionary[Client, tuple[frozenset[str], bool]] = weakref.WeakKeyDictionary()


def _within_reach(client: Client) -> bool:
    """Whether every worker reaches this process's memory. It is tried again when the workers have changed."""
    workers = frozenset(client.scheduler_info(n_workers=-1)["workers"])
    known = _tried.get(client)
    if known is not None and known[0] == workers:
        return known[1]
    if known is None:
        client.subscribe_topic(FORGOTTEN_TOPIC, lambda event: release(event[1]))
    reached = False
    if process_memory.allow():
        secret = process_memory.secret()
        answers = everywhere(client, process_memory.can_read, os.getpid(), secret.ctypes.data, secret.tobytes())
        reached = bool(answers) and all(answers.values())
    _tried[client] = workers, reached
    return reached

"""An array of the client's process, in host or GPU memory, as workers on the same machine read and write it.

Indexing reads a block of host memory, and assignment writes one. `distmm.worker.gpu_copies` copies blocks between GPUs
and both kinds of memory.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from distmm.errors import InputError
from distmm.transfer import gpu_allocations, loans, process_memory, shared_memory
from distmm.transfer.write_lease import Lease

MOST_PITCH = 2**31 - 1  # bytes from row to row that cudaMemcpy2D accepts


@dataclass(frozen=True)
class ClientArray:
    """An array, or a part of one, in the memory of process `pid`.

    Attributes
    ----------
    name : str
        Name of the loan that keeps the array alive; "" if the caller keeps it alive.
    pid, address : int
        Process that owns the memory, and address of the first element there.
    shape, strides, dtype
        As for a NumPy array.
    segment : Segment, Allocation or None
        Shared memory segment, or allocation in GPU memory, that contains the array.
    proof : process_memory.Proof
        That process, an address in it, and the random bytes there. Process numbers repeat on other machines: one that
        reads these bytes reads that process's memory and no other's.
    loan : Loan or None
        Keeps the array alive in its process (`distmm.transfer.loans`). None in other processes, on schedulers, and if
        the caller keeps it alive.
    lease : Lease or None
        Writers hold it. Without a lease, the caller must keep the memory allocated until the last write.
    mark : tuple of int
        An address in that process, and the number that is there as long as the array lives; (0, 0) without a loan.
    """

    name: str
    pid: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    segment: shared_memory.Segment | gpu_allocations.Allocation | None
    proof: process_memory.Proof
    loan: loans.Loan | None = field(default=None, compare=False, repr=False)
    lease: Lease | None = None
    mark: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, array: Any, name: str = "") -> ClientArray:
        """Describe a whole NumPy or CuPy array of this process."""
        segment: shared_memory.Segment | gpu_allocations.Allocation | None
        if gpu_allocations.is_on_gpu(array):
            address, segment = array.data.ptr, gpu_allocations.behind(array)
        else:
            address, segment = array.__array_interface__["data"][0], shared_memory.behind(array)
        where = name, os.getpid(), address, array.shape, array.strides, array.dtype
        loan = loans.Loan(name, array)
        return cls(*where, segment, process_memory.proof(), loan, mark=loan.mark)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.loan is not None:
            self.loan.send()
        where = self.name, self.pid, self.address, self.shape, self.strides, self.dtype, self.segment, self.proof
        return _received, (*where, None, self.lease, self.mark)

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
    def on_gpu(self) -> bool:
        """Whether it is in GPU memory."""
        return isinstance(self.segment, gpu_allocations.Allocation)

    @property
    def is_local(self) -> bool:
        """Whether its memory is this process's own."""
        return self.proof == process_memory.proof()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read a block: a view in the process that owns it, else a copy."""
        part = self.part(index)
        view: np.ndarray | None = part.local_view()
        if view is not None:
            return view
        part, swapped = part.with_contiguous_rows()
        block = np.empty(part.shape, part.dtype)
        part.read_into(block)
        return block.swapaxes(-1, -2) if swapped else block

    def __setitem__(self, index: tuple[slice, ...], block: Any) -> None:
        """Write a block of host memory; raises OSError if the lease has ended."""
        part, swapped = self.part(index).with_contiguous_rows()
        block = np.ascontiguousarray(np.swapaxes(block, -1, -2) if swapped else block, part.dtype)
        if block.shape != part.shape:
            raise ValueError(f"a block of shape {block.shape} cannot be written to a part of shape {part.shape}")
        with self.writing():
            part.write_from(block)

    def writing(self) -> AbstractContextManager[None]:
        """Return a context manager that holds the lease, if there is one, during a write.

        Raises
        ------
        OSError
            If the lease has ended.
        """
        return nullcontext() if self.lease is None else self.lease.writing()

    def part(self, index: tuple[slice, ...]) -> ClientArray:
        """Return the part of the array that a range for each dimension selects.

        Raises
        ------
        InputError
            If this process cannot reach the array.
        IndexError
            If a slice has a step other than 1.
        """
        if not self.is_local:
            _check_reach(self.proof)
        ranges = [range(*part.indices(n)) for part, n in zip(index, self.shape, strict=True)]
        if any(r.step != 1 for r in ranges):
            raise IndexError(f"{index}: a block is a slice of step 1 in each dimension")
        offset = sum(r.start * s for r, s in zip(ranges, self.strides, strict=True))
        return replace(self, address=self.address + offset, shape=tuple(map(len, ranges)))

    def local_view(self) -> Any:
        """Return a NumPy or CuPy array of it if this process owns it or it is empty; None otherwise."""
        if self.nbytes == 0 and not self.on_gpu:
            return np.empty(self.shape, self.dtype)
        if not self.is_local:
            return None
        layout = {"version": 3, "data": (self.address, False), "shape": self.shape, "strides": self.strides}
        loan = self.loan if self.loan is not None else loans.lent(self.name)
        if loan is None and self.name:
            raise InputError(self._freed())
        if self.on_gpu:
            import cupy

            memory = cupy.cuda.UnownedMemory(self.address, self.nbytes, loan)
            return cupy.ndarray(self.shape, self.dtype, cupy.cuda.MemoryPointer(memory, 0), self.strides)
        view = np.asarray(_Memory(loan, {**layout, "typestr": f"|V{self.dtype.itemsize}"}))
        return view.view(self.dtype)  # in two steps, because the array interface has no name for bfloat16

    def counted(self) -> None:
        """Give up the loan, in a scheduler that counts the tasks which refer to this object instead."""
        object.__setattr__(self, "loan", None)

    def _freed(self) -> str:
        return (
            f"an operand of shape {self.shape} has been freed: it lives as long as the lazy product and what is "
            "computed from it, but not as long as a pickled copy. Make the product again, or keep the operand"
        )

    def with_contiguous_rows(self) -> tuple[ClientArray, bool]:
        """Return the array with a contiguous last dimension, and whether its last two dimensions were swapped."""
        if self.strides[-1] == self.dtype.itemsize or self.shape[-1] <= 1:
            return self, False
        swap = (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)
        shape, strides = (tuple(values[d] for d in swap) for values in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides), True

    def merged(self) -> ClientArray:
        """Return the same elements in as few dimensions as their strides allow, and in two at least.

        Its own rows must be contiguous. A GPU copies matrices of the last two dimensions: rows, and the distances
        between them, have at most MOST_PITCH bytes. Rows in GPU memory that overlap, or come from the last to the
        first, are matrices of their own.
        """
        shape, strides = [self.shape[-1]], [self.dtype.itemsize]
        for n, stride in zip(self.shape[-2::-1], self.strides[-2::-1], strict=True):
            most = math.inf if len(shape) > 1 else MOST_PITCH // self.dtype.itemsize
            if stride == shape[0] * strides[0] and n * shape[0] <= most:
                shape[0] *= n
            elif n != 1:
                shape.insert(0, n)
                strides.insert(0, stride)
        least = shape[-1] * self.dtype.itemsize if self.on_gpu else -math.inf
        if len(shape) < 2 or not least <= strides[-2] <= MOST_PITCH:
            shape.insert(-1, 1)
            strides.insert(-1, self.nbytes)
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def rows(self) -> process_memory.Rows:
        """Return the addresses of its rows in row-major order, and the bytes of a row."""
        starts, few = np.array(self.address, np.int64), self.merged()
        for n, stride in zip(few.shape[:-1], few.strides[:-1], strict=True):
            starts = starts[..., None] + np.arange(n) * stride
        return starts.ravel(), few.shape[-1] * self.dtype.itemsize

    def read_into(self, target: np.ndarray) -> None:
        """Copy its elements to a C-contiguous array of the same shape; its own rows must be contiguous."""
        view = self.local_view()
        if view is not None:
            process_memory.copy(target, view)
        else:
            process_memory.read(self.pid, self.rows(), target.ctypes.data)
            check_marks([self])

    def write_from(self, source: np.ndarray) -> None:
        """Copy a C-contiguous array of the same shape into it; its own rows must be contiguous."""
        view = self.local_view()
        if view is not None:
            process_memory.copy(view, source)
        else:
            process_memory.write(self.pid, self.rows(), source.ctypes.data)


def check_marks(arrays: Sequence[ClientArray]) -> None:
    """Raise `InputError` if one of these arrays of a process was freed before its elements had been read in this one.

    Raises
    ------
    OSError
        If their process has ended.
    """
    marked = [array for array in arrays if array.mark[1]]
    if not marked:
        return
    found = np.zeros(len(marked), np.uint64)
    addresses = np.array([array.mark[0] for array in marked])
    process_memory.read(marked[0].pid, (addresses, found.itemsize), found.ctypes.data)
    for array, number in zip(marked, found, strict=True):
        if number != array.mark[1]:
            raise InputError(array._freed())


@dataclass(frozen=True)
class _Memory:
    """Memory for a NumPy view. The view keeps this object alive, and this object keeps the array alive."""

    owner: loans.Loan | np.ndarray | None
    __array_interface__: dict[str, Any]


def _received(*fields: Any) -> ClientArray:
    """Make an array again that has arrived in this process."""
    array = ClientArray(*fields)
    if not array.name or not array.is_local:
        return array
    loan = loans.received(array.name)
    if loan is None:
        raise InputError(array._freed())
    return replace(array, loan=loan)


@lru_cache(maxsize=64)
def _check_reach(proof: process_memory.Proof) -> None:
    """Raise `InputError` unless this process reads the proof of another one in its memory; errors are not cached."""
    if not process_memory.can_read(*proof):
        raise InputError(
            f"an array of process {proof[0]} is out of reach of this worker on {socket.gethostname()}. All workers "
            "reached it when distmm was called: either this worker joined later, from another machine or as another "
            "user, or that process has ended. Call distmm again: with the present workers the array is sent through "
            "the scheduler. Or write it to a file that all workers read, such as a Zarr folder"
        )

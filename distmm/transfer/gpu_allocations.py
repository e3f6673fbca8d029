"""Allocations in the memory of GPUs, which processes of one host lend each other by CUDA IPC.

The owner names an allocation: process, address and CUDA's handle. Another process maps it, and its GPU then copies from
and to it directly, also between two GPUs. CUDA finds the GPU by the handle, whatever ``CUDA_VISIBLE_DEVICES`` is.

To open a map takes 0.1 ms on the same GPU, 10 ms on its neighbour (H200), and up to seconds for 100 GB whose size is no
multiple of CUDA's large pages. So a process keeps a map for some time after the last copy, and longer if it took longer
to open. Then it closes the map, as soon as the owner has ended: until then the memory stays allocated.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from distmm.all_workers import owns_gpu
from distmm.pid import start_time, this_process

if TYPE_CHECKING:
    from distributed import Worker

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess

# A map that was opened within `OPENING_SECONDS` is closed `IDLE_SECONDS` after the last copy. One that took n times as
# long is kept n times as long.
IDLE_SECONDS, OPENING_SECONDS = 2.0, 0.02

ALREADY_MAPPED = 208  # cudaErrorAlreadyMapped

BUSY_SECONDS = 30.0  # most seconds that a new map waits for copies from memory that its owner has freed

SECRET = 32  # bytes by which a worker proves that it reads this process's GPU memory

_library = cache(ctypes.CDLL)  # loads each library once


@dataclass(frozen=True)
class Allocation:
    """Memory of a GPU that process `pid` has allocated.

    Attributes
    ----------
    pid : int
        Owner.
    started : str or None
        When it was started (`distmm.pid.start_time`), since process numbers are used again.
    handle : bytes
        Handle by which other processes map it.
    address, nbytes : int
        Address in the owner, and size.
    """

    pid: int
    started: str | None
    handle: bytes = field(repr=False)
    address: int
    nbytes: int

    @property
    def owner(self) -> tuple[int, str | None]:
        """The process, and when it was started."""
        return self.pid, self.started

    @property
    def is_local(self) -> bool:
        """Whether it is this process's own."""
        return self.owner == this_process()


def is_on_gpu(array: Any) -> bool:
    """Whether an array is CuPy's."""
    return type(array).__module__.partition(".")[0] == "cupy"


def behind(array: Any) -> Allocation | None:
    """Return the allocation that contains a CuPy array of this process; None for memory that has no handle.

    JAX, ``cudaMallocAsync`` and PyTorch's expandable segments allocate memory without handles, and MIG has none.
    """
    from cupy.cuda import runtime

    address, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    about = ctypes.byref(address), ctypes.byref(nbytes), ctypes.c_uint64(array.data.ptr)
    with array.device:
        runtime.setDevice(array.device.id)  # a thread that has used no GPU has no context, and the driver needs one
        if _library("libcuda.so.1").cuMemGetAddressRange_v2(*about):
            return None
        try:
            handle = bytes(runtime.ipcGetMemHandle(address.value))
        except runtime.CUDARuntimeError:
            return None
    return Allocation(*this_process(), handle, address.value, nbytes.value)


def plain(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an uninitialised CuPy array in memory that has a handle, on the current GPU."""
    import cupy

    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(1, nbytes)), 0))


def empty_on(device: int | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an uninitialised CuPy array on a GPU of this process, by default the current one.

    Its memory has a handle if the GPU gives any. None if there is no memory for it, or no such GPU.
    """
    import cupy

    try:
        with cupy.cuda.Device(device):
            array = cupy.empty(shape, dtype)
            return array if behind(array) is not None else plain(shape, dtype)
    except (MemoryError, cupy.cuda.runtime.CUDARuntimeError):
        return None


class _Map:
    """An allocation of another process, mapped into this one."""

    def __init__(self, allocation: Allocation) -> None:
        from cupy.cuda import runtime

        begun = time.monotonic()
        try:
            self.address = int(runtime.ipcOpenMemHandle(allocation.handle, LAZY_PEER_ACCESS))
        except runtime.CUDARuntimeError as error:
            raise OSError(
                f"the GPU memory of process {allocation.pid} is out of reach ({error}): has it ended, or freed the "
                "array?"
            ) from error
        self.users, self.used = 0, 0.0
        self.keeps = max(1.0, (time.monotonic() - begun) / OPENING_SECONDS)


_maps: dict[Allocation, _Map] = {}
_unused: list[int] = []  # addresses of maps that are being closed
_mapping = threading.Condition()


@contextmanager
def mapped(allocation: Allocation) -> Iterator[int]:
    """Yield the address of an allocation in this process. It is mapped during the ``with`` block.

    Raises
    ------
    OSError
        If its owner has ended or has freed it, or if this process's GPU cannot reach it.
    """
    if allocation.is_local:
        yield allocation.address
        return
    with _mapping:
        if allocation not in _maps:
            _maps[allocation] = _opened(allocation)
        found = _maps[allocation]
        found.users += 1
    try:
        yield found.address
    finally:
        with _mapping:
            found.users -= 1
            found.used = time.monotonic()
            _mapping.notify_all()


def _opened(allocation: Allocation) -> _Map:
    """Map an allocation. The caller holds the lock.

    CUDA refuses memory that its owner has freed and allocated again while the earlier allocation is mapped here. Then
    the owner's earlier maps are closed first.
    """
    try:
        return _Map(allocation)
    except OSError as error:
        if getattr(error.__cause__, "status", None) != ALREADY_MAPPED:
            raise
    earlier = [each for each in _maps if each.pid == allocation.pid]
    # Both waits release the lock: the worker's event loop takes it, too.
    _mapping.wait_for(lambda: not any(_maps[each].users for each in earlier if each in _maps), BUSY_SECONDS)
    close([_maps.pop(each).address for each in earlier if each in _maps and not _maps[each].users])
    _mapping.wait_for(lambda: not _unused, BUSY_SECONDS)
    return _maps[allocation] if allocation in _maps else _Map(allocation)  # another thread may have mapped it


def drop_idle(seconds: float = IDLE_SECONDS) -> None:
    """Close the maps that no copy has used for some seconds, and those of processes that have ended.

    Workers and clients call it every second.
    """
    now = time.monotonic()
    with _mapping:
        idle = [
            each
            for each, at in _maps.items()
            if not at.users and (now - at.used > seconds * at.keeps or start_time(each.pid) != each.started)
        ]
        addresses = [_maps.pop(each).address for each in idle]
    if addresses:
        close(addresses)


def close(addresses: list[int]) -> None:
    """Close maps in a thread: that waits for all work of the GPU, and the caller's event loop answers meanwhile."""
    from cupy.cuda import runtime

    with _mapping:
        _unused.extend(addresses)
    arguments = runtime.getDevice(), addresses
    threading.Thread(target=_close_unused, args=arguments, name="distmm-close", daemon=True).start()


def _close_unused(device: int, addresses: list[int]) -> None:
    from cupy.cuda import runtime

    runtime.setDevice(device)  # of this thread
    runtime.deviceSynchronize()  # copies from there may still run
    with _mapping:
        for address in addresses:
            _unused.remove(address)
            runtime.ipcCloseMemHandle(address)
        _mapping.notify_all()


@cache
def secret(device: int) -> tuple[Allocation | None, int, bytes]:
    """Return random bytes in the memory of one of this process's GPUs, with their allocation and address."""
    import cupy

    with cupy.cuda.Device(device):
        array = plain((SECRET,), np.dtype("u1"))
        expected = secrets.token_bytes(SECRET)
        array.set(np.frombuffer(expected, "u1"))
        cupy.cuda.get_current_stream().synchronize()
    _secrets.append(array)
    return behind(array), array.data.ptr, expected


_secrets: list[Any] = []


def can_map(allocation: Allocation, address: int, expected: bytes, dask_worker: Worker) -> bool:
    """Whether a worker's GPU reads memory of another process of the same machine. Runs on workers."""
    if not (allocation.is_local or owns_gpu(dask_worker)):  # others shall make no context on a GPU
        return False
    from cupy.cuda import runtime

    found = np.zeros(len(expected), np.uint8)
    try:
        with mapped(allocation) as base:
            source = base + address - allocation.address
            runtime.memcpy(found.ctypes.data, source, found.nbytes, runtime.memcpyDefault)
    except (OSError, runtime.CUDARuntimeError):
        return False
    return found.tobytes() == expected

"""Memory of another process of this user, read and written by the kernel's cross-memory attach, in several threads.

``process_vm_readv`` copies directly between two processes, and the other process takes no part in it. MPI libraries and
UCX use it between ranks of one machine. `copy` is the plain NumPy copy for memory of this process, in the same threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

__all__ = ["allow", "can_read", "copy", "populate", "read", "secret", "write"]

# One thread copies 2 to 4 GB/s; 8 threads copied 17 GB/s (two H200, 32 cores). A GPU's host link takes 55 GB/s.
THREADS = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

# Bytes of one call: every thread gets a part of a 64 MB staging buffer, and the cost of a call is a small part of it.
PIECE = 4 << 20

IOV_MAX = 1024  # ranges of one call: the kernel's limit

PR_SET_PTRACER = 0x59616D61
MADV_POPULATE_WRITE = 23

Rows = tuple[np.ndarray, int]  # address of every row, and their length in bytes


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("process_vm_readv", "process_vm_writev"):
        function = getattr(libc, name)
        pointer, count = ctypes.c_void_p, ctypes.c_ulong
        function.argtypes, function.restype = [ctypes.c_int, pointer, count, pointer, count, count], ctypes.c_ssize_t
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="distmm-copy")


def read(pid: int, theirs: Rows, ours: int) -> None:
    """Copy rows of another process to consecutive addresses from `ours` on.

    Raises
    ------
    OSError
        If the process has ended, or its memory is no longer there.
    """
    _all(_libc().process_vm_readv, pid, theirs, ours)


def write(pid: int, theirs: Rows, ours: int) -> None:
    """Copy from consecutive addresses to rows of another process; raises like `read`."""
    _all(_libc().process_vm_writev, pid, theirs, ours)


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy between two matrices, or stacks of matrices, of one shape and type in this process."""
    if target.dtype.kind == "V":  # bfloat16: NumPy would copy it element by element, under the interpreter's lock
        target, source = (x.view(f"u{x.itemsize}") for x in (target, source))
    height = max(1, PIECE // max(1, target[:1].nbytes))
    bands = [slice(first, first + height) for first in range(0, len(target), height)]
    for _ in _threads().map(lambda band: np.copyto(target[band], source[band]), bands):
        pass


def _all(call: Callable[..., int], pid: int, theirs: Rows, ours: int) -> None:
    for _ in _threads().map(lambda piece: _one(call, pid, *piece), list(_pieces(theirs, ours))):
        pass


def _pieces(theirs: Rows, ours: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield vectors of (address, bytes) here and in the other process: about PIECE bytes in at most IOV_MAX ranges."""
    starts, width = theirs
    if np.all(np.diff(starts) == width):  # no gaps: one range
        starts, width = starts[:1], width * len(starts)
    count = max(1, min(IOV_MAX, PIECE // width))
    for first in range(0, len(starts), count):
        part = starts[first : first + count]
        for skip in range(0, width, PIECE):  # a row that is longer than a piece is cut into several
            size = min(PIECE, width - skip) if len(part) == 1 else width
            here = np.array([[ours + first * width + skip, size * len(part)]], np.uint64)
            yield here, np.stack([part + skip, np.full_like(part, size)], 1).astype(np.uint64)
            if len(part) > 1:
                break


def _one(call: Callable[..., int], pid: int, here: np.ndarray, there: np.ndarray) -> None:
    wanted = int(here[:, 1].sum())
    done = call(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
    if done != wanted:
        reason = os.strerror(ctypes.get_errno()) if done < 0 else f"{done} of {wanted} bytes moved"
        raise OSError(f"the memory of process {pid} is out of reach ({reason}): has it ended, or freed the array?")


def populate(address: int, nbytes: int) -> None:
    """Have the system provide the pages of a new map in several threads; one thread provides only 2 GB/s."""
    size = -(-nbytes // THREADS)
    size += -size % mmap.PAGESIZE
    # Linux before 5.14 refuses this advice. It then provides the pages at their first use.
    for _ in _threads().map(
        lambda first: _libc().madvise(address + first, min(size, nbytes - first), MADV_POPULATE_WRITE),
        range(0, nbytes, size),
    ):
        pass


def allow() -> bool:
    """Let the descendants of this process, such as the workers of a local cluster, use its memory.

    For other processes the system's own rule holds: processes of the same user, unless a security module such as Yama
    forbids it. Returns whether the system can share memory in this way at all.
    """
    if not sys.platform.startswith("linux"):
        return False
    _libc().prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getpid()), 0, 0, 0)  # fails without harm if there is no Yama
    return True


@cache
def secret() -> np.ndarray:
    """Return 32 random bytes in this process's memory. A process that can read them reaches this process."""
    return np.frombuffer(secrets.token_bytes(32), np.uint8)


def can_read(pid: int, address: int, expected: bytes) -> bool:
    """Whether the memory of process `pid` is within reach: the same machine, and allowed. Runs on workers."""
    if pid == os.getpid():  # this process, unless the secret is that of a process with its number on another machine
        return secret().ctypes.data == address and secret().tobytes() == expected
    ours = np.zeros(len(expected), np.uint8)
    try:
        read(pid, (np.array([address]), len(expected)), ours.ctypes.data)
    except OSError:
        return False
    return ours.tobytes() == expected

"""Reads and writes of another process's memory by Linux's cross-memory attach, in several threads.

``process_vm_readv`` copies directly between two processes of a user, without any action of the other process. MPI
libraries and UCX use it between ranks of one machine. `copy` is a NumPy copy within this process, in the same threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import numpy as np

# One thread copies 2 to 4 GB/s; 8 threads copied 17 GB/s (two H200, 32 cores). A GPU's host link takes 55 GB/s.
THREADS = min(16, len(os.sched_getaffinity(0)))

# Bytes of one call: large enough to hide the cost of a call, and small enough that each of 16 threads gets a part of a
# staging buffer of 64 MB.
PIECE = 4 << 20

IOV_MAX = 1024  # the system's limit of ranges in one call

PR_SET_PTRACER = 0x59616D61
MADV_POPULATE_WRITE = 23

Rows = tuple[np.ndarray, int]  # addresses of all rows, and bytes of a row
Proof = tuple[int, int, bytes]  # a process, an address in its host memory, and the bytes there

Piece = TypeVar("Piece")


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


os.register_at_fork(after_in_child=_threads.cache_clear)  # the child has none of the threads


def in_threads(threads: ThreadPoolExecutor, function: Callable[[Piece], object], pieces: Iterable[Piece]) -> None:
    """Call a function of each piece in these threads, and return or raise when none of the calls runs any more.

    The caller may free the memory, or use it otherwise, as soon as this has raised.
    """
    calls = [threads.submit(function, piece) for piece in pieces]
    try:
        wait(calls, return_when=FIRST_EXCEPTION)
    finally:
        pending = [call for call in calls if not call.cancel()]
        wait(pending)
    for call in pending:
        call.result()


def read(pid: int, theirs: Rows, ours: int) -> None:
    """Copy rows of process `pid` to consecutive addresses of this process, starting at `ours`.

    Raises
    ------
    OSError
        If the process has ended, or has freed the memory.
    """
    _copy_pieces(_libc().process_vm_readv, pid, theirs, ours)


def write(pid: int, theirs: Rows, ours: int) -> None:
    """Copy from consecutive addresses of this process to rows of process `pid`; raises like `read`."""
    _copy_pieces(_libc().process_vm_writev, pid, theirs, ours)


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy a matrix, or a stack of matrices, to another of the same shape and type in this process."""
    if target.dtype.kind == "V":  # NumPy would copy bfloat16 element by element, and hold the interpreter lock
        target, source = (x.view(f"u{x.itemsize}") for x in (target, source))
    if len(target) == 1:  # a long row
        target, source = target[0], source[0]
    height = max(1, PIECE // max(1, target[:1].nbytes))
    bands = [slice(first, first + height) for first in range(0, len(target), height)]
    in_threads(_threads(), lambda band: np.copyto(target[band], source[band]), bands)


def _copy_pieces(call: Callable[..., int], pid: int, theirs: Rows, ours: int) -> None:
    pieces = list(_pieces(theirs, ours))
    if len(pieces) == 1:  # a thread takes longer to answer than a few bytes take
        _copy_piece(call, pid, *pieces[0])
    else:
        in_threads(_threads(), lambda piece: _copy_piece(call, pid, *piece), pieces)


def _pieces(theirs: Rows, ours: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield arrays of (address, bytes) here and in the other process: about PIECE bytes in at most IOV_MAX ranges."""
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


def _copy_piece(call: Callable[..., int], pid: int, here: np.ndarray, there: np.ndarray) -> None:
    wanted = int(here[:, 1].sum())
    done = call(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
    if done != wanted:
        reason = os.strerror(ctypes.get_errno()) if done < 0 else f"{done} of {wanted} bytes moved"
        raise OSError(f"the memory of process {pid} is out of reach ({reason}): has it ended, or freed the array?")


def populate(address: int, nbytes: int) -> None:
    """Allocate the pages of a new map in several threads; one thread alone allocates only 2 GB/s."""
    size = -(-nbytes // THREADS)
    size += -size % mmap.PAGESIZE
    # Linux before 5.14 refuses this advice and allocates the pages at their first use.
    in_threads(
        _threads(),
        lambda first: _libc().madvise(address + first, min(size, nbytes - first), MADV_POPULATE_WRITE),
        range(0, nbytes, size),
    )


def allow(ancestor: int | None = None) -> None:
    """Allow the descendants of a process, by default of this one, as of a local cluster, to access this one's memory.

    By the system's rule, other processes of the same user have access too, unless a security module such as Yama
    forbids it.
    """
    allowed = ctypes.c_ulong(ancestor or os.getpid())
    _libc().prctl(PR_SET_PTRACER, allowed, 0, 0, 0)  # fails without harm if there is no Yama


@cache
def _secret() -> np.ndarray:
    return np.frombuffer(secrets.token_bytes(32), np.uint8)


def proof() -> Proof:
    """Return the proof of this process: a process that reads these random bytes has access to it."""
    return os.getpid(), _secret().ctypes.data, _secret().tobytes()


def can_read(pid: int, address: int, expected: bytes) -> bool:
    """Whether this process has access to process `pid` of the same machine. Runs on workers."""
    if pid == os.getpid():  # the same number on another machine has another secret
        return proof() == (pid, address, expected)
    ours = np.zeros(len(expected), np.uint8)
    try:
        read(pid, (np.array([address]), len(expected)), ours.ctypes.data)
    except OSError:
        return False
    return ours.tobytes() == expected

"""Writes that survive a loss of power (fsync), files that get their names when they are complete, atomic exchange."""

from __future__ import annotations

import ctypes
import errno
import filecmp
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO

from distmm.errors import InputError

__all__ = ["exchange", "fsync", "fsync_tree", "published", "remove", "together"]

# From Linux' <fcntl.h> and <linux/fs.h>.
AT_FDCWD, RENAME_EXCHANGE = -100, 2

# Error codes of file systems without hard links.
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}


_calls: dict[Hashable, list[Future[None]]] = {}  # by key: the call that runs, and the one that waits for its end
_guard = threading.Lock()  # of `_calls`


def together(key: Hashable, call: Callable[[], object]) -> None:
    """Make one call for all threads of this process that ask with the same key before it begins.

    Parameters
    ----------
    key : hashable
    call : callable
        The same for all threads. It must not matter which thread makes it. Its error is raised in all of them.
    """
    mine: Future[None] = Future()
    with _guard:
        calls = _calls.setdefault(key, [])
        if len(calls) < 2:
            calls.append(mine)
        before, found = calls[0], calls[-1]
    if found is not mine:
        found.result()
        return
    try:
        if before is not mine:
            before.exception()  # returns when that call has ended
        call()
    except BaseException as error:
        _leave(key, mine)
        mine.set_exception(error)
        raise
    _leave(key, mine)
    mine.set_result(None)


def _leave(key: Hashable, call: Future[None]) -> None:
    """Forget a call that has ended. The one that waits for its end begins: no more threads join it."""
    with _guard:
        _calls[key].remove(call)
        if not _calls[key]:
            del _calls[key]


def fsync(path: str) -> None:
    """Return when a file, or the names in a folder, are on the disk. Threads that wait for the same path share a call.

    Each of them relies only on what it has done before it asked, and the call begins after that.
    """

    def sync() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    together(path, sync)


def fsync_tree(path: str) -> None:
    """Return when a file, or a folder with its contents, is on the disk. The caller syncs the parent for its name."""
    if os.path.isdir(path):
        for folder, _, names in os.walk(path, topdown=False):
            for name in names:
                fsync(os.path.join(folder, name))
            fsync(folder)
    else:
        fsync(path)


@contextmanager
def published(path: str, drafts: str) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is complete and on the disk. An existing file is not replaced.

    Two processes may write the same file if the scheduler has lost one of them. The first to finish creates the name.

    Parameters
    ----------
    path : str
        Final name. The caller has to sync its folder.
    drafts : str
        Folder for incomplete files, on the same file system.

    Yields
    ------
    file
        Open for writing.

    Raises
    ------
    InputError
        If a file with this name and other contents exists.
    """
    draft = os.path.join(drafts, f"{uuid.uuid4().hex}.draft")
    try:
        with open(draft, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            if not filecmp.cmp(draft, path, shallow=False):
                raise InputError(
                    f"{path}: a worker that the scheduler has lost has written other bits to this block: continue the "
                    f"job with distmm resume, which computes the block again"
                ) from None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            os.rename(draft, path)
    finally:
        if os.path.exists(draft):
            os.unlink(draft)


def exchange(one: str, other: str) -> bool:
    """Exchange two names atomically. Return False, and change nothing, if the system or file system cannot."""
    rename = _renameat2()
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), one, None, other)


def remove(path: str) -> None:
    """Remove a file, a link, or a folder with its contents."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


@cache
def _renameat2() -> Any:
    """Return the C library's `renameat2`. None if it has none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function

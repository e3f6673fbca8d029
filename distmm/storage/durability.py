"""Writes that survive a loss of power (fsync), files that get their names when they are complete, atomic exchange."""

from __future__ import annotations

import ctypes
import errno
import filecmp
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from distmm.errors import InputError

# From Linux' <fcntl.h> and <linux/fs.h>.
AT_FDCWD, RENAME_EXCHANGE = -100, 2

# Error codes of file systems without hard links.
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}

# Files that a process syncs at the same time, if a call has several.
SYNCS = 8


def fsync(path: str) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
def published(paths: Sequence[str], drafts: str, replace: bool = False) -> Iterator[list[FileIO]]:
    """Write files that get their names when all of them are complete and on the disk.

    They are synced at the same time, for which a file system's journal makes one commit where it can.

    Parameters
    ----------
    paths : sequence of str
        Final names. The caller has to sync their folders.
    drafts : str
        Folder for incomplete files, on the same file system.
    replace : bool
        Whether an existing file is replaced. Otherwise the first of two processes that write the same file, because the
        scheduler has lost one of them, creates the name.

    Yields
    ------
    list of FileIO
        Open for writing, by `write_all`. Each system call costs a wait for Python's global lock, and files without a
        buffer need fewer of them.

    Raises
    ------
    InputError
        If a file that is not replaced exists with other contents.
    """
    waiting = {os.path.join(drafts, f"{uuid.uuid4().hex}.draft"): path for path in paths}
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(open(draft, "xb", buffering=0)) for draft in waiting]
            yield files
            _fsync_all([file.fileno() for file in files])
        for draft, path in list(waiting.items()):
            if replace:
                os.replace(draft, path)
            else:
                _name(draft, path)
            del waiting[draft]
    finally:
        for draft in waiting:
            Path(draft).unlink(missing_ok=True)


def write_all(file: FileIO, data: Any, at: int = 0) -> None:
    """Write all bytes of `data` at a place in a file. A full disk raises OSError."""
    left = memoryview(data)
    while left:  # a system call writes at most 2 GB, or what still fits on the disk
        count = os.pwrite(file.fileno(), left, at)
        left, at = left[count:], at + count


def _fsync_all(descriptors: list[int]) -> None:
    """Return when several open files are on the disk."""
    if len(descriptors) == 1:
        os.fsync(descriptors[0])
        return
    with ThreadPoolExecutor(SYNCS) as pool:
        list(pool.map(os.fsync, descriptors))


def _name(draft: str, path: str) -> None:
    """Give a draft its name, unless the same file has it already."""
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
        return
    os.unlink(draft)


def exchange(one: str, other: str) -> bool:
    """Exchange two names atomically. Return False, and change nothing, if the system or file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # another system than Linux
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

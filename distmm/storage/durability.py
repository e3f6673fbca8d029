"""Writes that outlive a loss of power (fsync), names that appear with all that they stand for, and their exchange."""

from __future__ import annotations

import ctypes
import errno
import filecmp
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO

from distmm.errors import InputError

__all__ = ["exchange", "fsync", "fsync_tree", "published", "remove"]

# From Linux' <fcntl.h> and <linux/fs.h>.
AT_FDCWD, RENAME_EXCHANGE = -100, 2

# What file systems without hard links say to a link.
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}


def fsync(path: str) -> None:
    """Return once a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: str) -> None:
    """Return once a file, or a folder with all that is in it, is on the disk; its own name needs its parent's fsync."""
    if os.path.isdir(path):
        for folder, _, names in os.walk(path, topdown=False):
            for name in names:
                fsync(os.path.join(folder, name))
            fsync(folder)
    else:
        fsync(path)


@contextmanager
def published(path: str, drafts: str) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is whole and on the disk; what has the name already is not replaced.

    Two processes may make the same, if one of them was held to be lost. The first one that is ready gives the name.

    Parameters
    ----------
    path : str
        Final name; its folder has to be synced.
    drafts : str
        Folder of what is not whole, on the same file system.

    Yields
    ------
    file
        Open for writing.

    Raises
    ------
    InputError
        If another process has given the name to something else.
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
                    f"{path}: another worker, which was held to be lost, has written other bits and has not said so; "
                    f"distmm resume makes this block again"
                ) from None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            os.rename(draft, path)
    finally:
        if os.path.exists(draft):
            os.unlink(draft)


def exchange(one: str, other: str) -> bool:
    """Exchange two names atomically; return False, with nothing done, where system or file system cannot."""
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
    """Remove a file, a link, or a folder with all that is in it."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


@cache
def _renameat2() -> Any:
    """Return the C library's function; None where there is none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function

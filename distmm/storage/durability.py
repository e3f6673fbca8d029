"""Writes that outlive a loss of power (fsync), and the atomic exchange of two names."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from functools import cache
from typing import Any

__all__ = ["exchange", "fsync", "fsync_tree", "remove"]

# From Linux' <fcntl.h> and <linux/fs.h>.
AT_FDCWD, RENAME_EXCHANGE = -100, 2


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

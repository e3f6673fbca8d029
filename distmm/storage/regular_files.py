"""Refuses paths that are not regular files: a pipe may never end, and reading a device may have side effects."""

from __future__ import annotations

import os
import stat

KINDS = {
    stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}  # fmt: skip


def kind(mode: int) -> str:
    """Return a name for the kind of a file, by its mode."""
    return next((name for is_kind, name in KINDS.items() if is_kind(mode)), "a file")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError if a path is not a regular file. Called before the path is opened."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{os.fspath(path)} is {kind(found.st_mode)}, not a file with data: put a copy of the data there")

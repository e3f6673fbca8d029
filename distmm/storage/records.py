"""Stores of a job's records (manifest, lock, markers, certificate): files on a disk, or objects in an object store.

A record has a few kilobytes. It is written atomically: it is complete, or it does not exist. `records(path)` returns
the store of a path, `DISK` or `OBJECTS`. Both have the same methods and guarantees. Folders and records are
named by paths or URLs.

Only one process at a time, the *owner* of a folder, may change the folder's contents. On a disk, each owner has its own
subfolder, which it creates once, before it becomes the owner. It creates all files there, and changes names outside
only by renames from or to this subfolder. The next owner renames the subfolder of the former owner (`take_over`). From
then on all paths of the former owner fail, even if that process checked its ownership just before.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

from distmm.storage.durability import fsync, published, remove, write_all
from distmm.storage.object_store import OBJECTS, Objects, is_url

# Name of an owner's subfolder: a token of `distmm.job.lock`.
OWNER = re.compile("[0-9a-f]{32}")


class Disk:
    """Files and folders, local or mounted."""

    def exists(self, path: str) -> bool:
        """Whether a record exists."""
        return os.path.exists(path)

    def names(self, folder: str) -> list[str]:
        """Return the names of records and folders in a folder."""
        return os.listdir(folder)

    def read(self, path: str) -> bytes:
        """Return a record."""
        with open(path, "rb", buffering=0) as file:  # saves 15 us for each marker, of which there may be 40,000
            return file.read()

    def read_all(self, folder: str) -> Iterator[tuple[str, bytes | Exception]]:
        """Yield the name of each record of a folder, with its content or the error of reading it."""
        for name in os.listdir(folder):
            try:
                yield name, self.read(os.path.join(folder, name))
            except OSError as error:
                yield name, error

    def write(self, path: str, content: bytes, drafts: str | None = None) -> None:
        """Write and sync a record. On a disk, an incomplete one is in the folder `drafts`, or else in the record's."""
        folder = os.path.dirname(path)
        with published([path], drafts or folder, replace=True) as (file,):
            write_all(file, content)
        fsync(folder)

    def create(self, path: str, content: bytes) -> None:
        """Write a new record; raise FileExistsError if it exists. Only one of several processes succeeds."""
        with open(path, "xb", buffering=0) as file:  # O_EXCL, which also works on NFS
            try:
                write_all(file, content)
                os.fsync(file.fileno())
            except OSError:  # for example a full disk: an empty lock file would block the next job for a minute
                os.unlink(path)
                raise

    def touch(self, path: str) -> None:
        """Update the time of a record, to show that its owner is alive."""
        os.utime(path)

    def age(self, path: str) -> float:
        """Return the seconds since a record was written or touched, by the store's clock."""
        return self._now(os.path.dirname(path)) - os.stat(path).st_mtime

    def remove(self, path: str) -> None:
        """Remove a record."""
        os.unlink(path)

    def discard(self, path: str, owner: str) -> None:
        """Remove a record or a whole folder. Raise FileNotFoundError if the owner's subfolder `owner` was renamed."""
        aside = os.path.join(owner, f"removed.{uuid.uuid4().hex}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            os.stat(owner)  # fails if another process has taken over
            return
        with suppress(FileNotFoundError):
            remove(aside)

    def own(self, folder: str, token: str) -> str:
        """Create the subfolder of a future owner of `folder`, and return its path."""
        path = os.path.join(folder, token)
        os.mkdir(path)
        return path

    def take_over(self, folder: str, token: str) -> None:
        """Move the folders of former owners to the subfolder `token`, so that former owners cannot change them."""
        mine = os.path.join(folder, token)
        for name in os.listdir(folder):
            before = os.path.join(mine, name)
            if name == token or not os.path.isdir(os.path.join(folder, name)) or name.startswith("lock."):
                continue
            # Rename the whole subfolder first. After that no other process changes its contents.
            os.rename(os.path.join(folder, name), before)
            if OWNER.fullmatch(name):
                for work in list(_work(before)):
                    os.rename(work, os.path.join(mine, os.path.basename(work)))
                with suppress(FileNotFoundError):
                    remove(before)
        fsync(mine)
        fsync(folder)

    def sync(self, folder: str) -> None:
        """Sync a folder, so that removals and renames in it survive a loss of power."""
        fsync(folder)

    def make_folder(self, folder: str) -> None:
        """Create a folder, unless it exists, and sync its name."""
        with suppress(FileExistsError):
            os.mkdir(folder)  # not makedirs: an owner's subfolder must not be created a second time
        fsync(os.path.dirname(folder))

    def remove_folder(self, folder: str) -> None:
        """Remove a folder, if it is empty."""
        with suppress(OSError):  # for example, it is not empty, or its mount was lost
            os.rmdir(folder)

    @staticmethod
    def _now(folder: str) -> float:
        """Return the file system's time. The clocks of two machines may differ by more than a minute."""
        probe = os.path.join(folder, f"clock.{uuid.uuid4().hex}")
        try:
            with open(probe, "w"):
                return os.stat(probe).st_mtime
        except OSError:  # without permission to write here, use this machine's clock
            return time.time()
        finally:
            if os.path.exists(probe):
                os.unlink(probe)


def records(path: str) -> Records:
    """Return the store of a path or URL."""
    return OBJECTS if is_url(path) else DISK


def _work(folder: str) -> Iterator[str]:
    """Yield the folders of work in an owner's subfolder, and in subfolders that this owner was taking over."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if OWNER.fullmatch(name):
            yield from _work(path)
        elif os.path.isdir(path) and not name.startswith("removed."):
            yield path


DISK = Disk()
Records = Disk | Objects

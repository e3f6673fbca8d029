"""Stores of a job's records (manifest, lock, markers, certificate): files on a disk, or objects in an object store.

A record is a few kilobytes, and whole or not there. `records(path)` returns the store of a path: `Disk` or `Objects`,
which make the same promises by other means. Names of folders and records are paths, or URLs.

Of the processes that change what lies in one folder, one at a time is its *owner*. On a disk each owner has a folder of
its own inside, which it makes once, before it is the owner. All that it makes goes there first, and names outside
change only by a rename from there or to there. Who becomes the owner after it renames that folder (`take_over`). From
then on the system finds no path of the former owner any more, whenever that one had looked whether it is the owner.
"""

from __future__ import annotations

import errno
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from distmm.errors import InputError
from distmm.storage.durability import fsync, remove
from distmm.storage.object_store import ObjectFolder, is_url

__all__ = ["OWNER", "Records", "records"]

# Name of an owner's folder: a token of `distmm.job.lock`.
OWNER = re.compile("[0-9a-f]{32}")


class Records(Protocol):
    """A store of records."""

    def exists(self, path: str) -> bool:
        """Whether a record is there."""

    def names(self, folder: str) -> list[str]:
        """Return the names of records and folders in a folder."""

    def read(self, path: str) -> bytes:
        """Return a record."""

    def read_all(self, folder: str) -> Iterator[tuple[str, bytes | Exception]]:
        """Yield all records of a folder with their names, or the error of one that cannot be read."""

    def write(self, path: str, content: bytes, draft: str | None = None) -> None:
        """Write a record and sync it. On a disk it has the name `draft` until it is whole."""

    def create(self, path: str, content: bytes) -> None:
        """Write a record; raise FileExistsError if there is one. Of several processes one succeeds."""

    def touch(self, path: str) -> None:
        """Show that the owner of a record is alive."""

    def age(self, path: str) -> float:
        """Return the seconds since a record was written or touched, by the store's clock."""

    def remove(self, path: str) -> None:
        """Remove a record."""

    def discard(self, path: str, owner: str) -> None:
        """Remove a record, or a folder with all that is in it, unless the folder `owner` is no longer an owner's."""

    def own(self, folder: str, token: str) -> str:
        """Make the folder through which one process will change what is in `folder`, and return its path."""

    def take_over(self, folder: str, token: str) -> None:
        """Move the work of former owners to that of `token`, and keep them from changing anything."""

    def sync(self, folder: str) -> None:
        """Sync a folder: what was removed or renamed in it stays so after a loss of power."""

    def make_folder(self, folder: str) -> None:
        """Make a folder, unless it exists, and sync its name."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder, if it is empty."""


class Disk:
    """Files and folders, local or mounted."""

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def names(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def read(self, path: str) -> bytes:
        with open(path, "rb", buffering=0) as file:  # 15 us a marker less than as text, of which there may be 40,000
            return file.read()

    def read_all(self, folder: str) -> Iterator[tuple[str, bytes | Exception]]:
        for name in os.listdir(folder):
            try:
                yield name, self.read(os.path.join(folder, name))
            except OSError as error:
                yield name, error

    def write(self, path: str, content: bytes, draft: str | None = None) -> None:
        draft = draft or f"{path}.{uuid.uuid4().hex}.draft"
        try:
            with open(draft, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            if os.path.exists(draft):
                os.unlink(draft)
            raise
        fsync(os.path.dirname(path))

    def create(self, path: str, content: bytes) -> None:
        # O_EXCL holds on NFS too.
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError:  # a full disk: an empty lock file would block the next job for a minute
            os.unlink(path)
            raise

    def touch(self, path: str) -> None:
        os.utime(path)

    def age(self, path: str) -> float:
        return self._now(os.path.dirname(path)) - os.stat(path).st_mtime

    def remove(self, path: str) -> None:
        os.unlink(path)

    def discard(self, path: str, owner: str) -> None:
        aside = os.path.join(owner, f"removed.{uuid.uuid4().hex}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            os.stat(owner)  # it is gone if somebody has taken over
            return
        with suppress(FileNotFoundError):
            remove(aside)

    def own(self, folder: str, token: str) -> str:
        path = os.path.join(folder, token)
        os.mkdir(path)
        return path

    def take_over(self, folder: str, token: str) -> None:
        mine = os.path.join(folder, token)
        for name in os.listdir(folder):
            before = os.path.join(mine, name)
            if name == token or not os.path.isdir(os.path.join(folder, name)) or name.startswith("lock."):
                continue
            # One rename of the whole. Where its work is, is seen afterwards, when nobody changes it any more.
            os.rename(os.path.join(folder, name), before)
            if OWNER.fullmatch(name):
                for work in list(_work(before)):
                    os.rename(work, os.path.join(mine, os.path.basename(work)))
                with suppress(FileNotFoundError):
                    remove(before)
        fsync(mine)
        fsync(folder)

    def sync(self, folder: str) -> None:
        fsync(folder)

    def make_folder(self, folder: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(folder)  # no folder above it: that of an owner is made once
        fsync(os.path.dirname(folder))

    def remove_folder(self, folder: str) -> None:
        with suppress(OSError):  # it is not empty, or its mount is gone
            os.rmdir(folder)

    @staticmethod
    def _now(folder: str) -> float:
        """Time by the file system's clock. The clocks of two machines may differ by more than a minute."""
        probe = os.path.join(folder, f"clock.{uuid.uuid4().hex}")
        try:
            with open(probe, "w"):
                return os.stat(probe).st_mtime
        except OSError:  # no permission to write here: this machine's clock is used
            return time.time()
        finally:
            if os.path.exists(probe):
                os.unlink(probe)


class Objects:
    """Objects of S3, Google Cloud Storage or Azure; a folder is what names begin with, and needs no making."""

    def exists(self, path: str) -> bool:
        folder, name = _split(path)
        return folder.facts(name) is not None

    def names(self, folder: str) -> list[str]:
        return ObjectFolder(folder).names()

    def read(self, path: str) -> bytes:
        folder, name = _split(path)
        return folder.read(name)

    def read_all(self, folder: str) -> Iterator[tuple[str, bytes | Exception]]:
        here = ObjectFolder(folder)
        yield from here.read_all(here.names()).items()

    def write(self, path: str, content: bytes, draft: str | None = None) -> None:
        folder, name = _split(path)
        folder.put(name, content)

    def create(self, path: str, content: bytes) -> None:
        """Write a record where there is none.

        Some stores take the condition of a put and do not look at it. So the put is made once more, and has to fail.
        """
        folder, name = _split(path)
        try:
            folder.create(name, content)
        except FileExistsError:
            # A put whose answer was lost was sent again by the package. Contents name their owner.
            if folder.read(name) != content:
                raise
        try:
            folder.create(name, b"")
        except FileExistsError:
            return
        folder.remove([name])
        raise InputError(
            f"{path}: this store puts an object even if it exists and must not be replaced (If-None-Match: *), so "
            f"nothing can keep two jobs apart there; use a store that knows this condition, or write C to a folder"
        )

    def touch(self, path: str) -> None:
        # Not the record itself: its owner may have been asleep, and would bring back what was removed meanwhile.
        folder, name = _split(path)
        folder.put(f"{name}.beat", b"")

    def age(self, path: str) -> float:
        folder, name = _split(path)
        written = folder.modified(name)
        if not written:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        probe = f"clock.{uuid.uuid4().hex}"
        folder.put(probe, b"")
        try:
            return folder.modified(probe) - max(written, folder.modified(f"{name}.beat"))
        finally:
            folder.remove([probe])

    def remove(self, path: str) -> None:
        folder, name = _split(path)
        folder.remove([name, f"{name}.beat"])

    def discard(self, path: str, owner: str) -> None:
        above, name = _split(path)
        above.remove([*(f"{name}/{each}" for each in ObjectFolder(path).everything()), name, f"{name}.beat"])

    def own(self, folder: str, token: str) -> str:
        return f"{folder}/{token}"

    def take_over(self, folder: str, token: str) -> None:
        return

    def sync(self, folder: str) -> None:
        return

    def make_folder(self, folder: str) -> None:
        return

    def remove_folder(self, folder: str) -> None:
        return


def records(path: str) -> Records:
    """Return the store that a path, or a URL, is in."""
    return OBJECTS if is_url(path) else DISK


def _work(folder: str) -> Iterator[str]:
    """Yield the folders in which owners have worked: in that of an owner, or of one that it was taking over from."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if OWNER.fullmatch(name):
            yield from _work(path)
        elif os.path.isdir(path) and not name.startswith("removed."):
            yield path


def _split(path: str) -> tuple[ObjectFolder, str]:
    folder, name = path.rsplit("/", 1)
    return ObjectFolder(folder), name


DISK, OBJECTS = Disk(), Objects()

"""A lock for the output of a job, for machines that share only a file system or an object store.

The lock of a dead job expires after at most a minute.

The lock is the file ``lock.N`` with the largest N. It is created with ``O_EXCL``, so that only one of several processes
succeeds, on NFS too. Its owner touches the file every `BEAT_SECONDS`. A lock is *stale* if

- its owner ran on this machine (same host name, boot and process namespace) and that process has ended, or
- its owner ran on another machine, and has not touched the file for `STALE_SECONDS` by the file system's clock.

To take over a stale ``lock.N``, a process creates ``lock.N+1`` and then removes ``lock.N``. Numbers start from 0 again
after a lock was released. Each lock file has a random token, which is never used again. It is the id of the run. If
another process takes over from a suspended job, the client and the workers of the suspended job find another token when
they wake up, and stop. Workers check the token before they write a block and before they write its marker. The client
checks it before C gets its name.

A process may be suspended between this check and the following write. So on a disk the token is also the name of the
owner's subfolder (`distmm.storage.records`). The owner makes every change through it. The next owner renames it, so
that every later open, link, rename and removal by the former owner's client and workers fails. Files that were already
open have no final name yet (chunks of Zarr arrays, block rows, JSON), or are locked (``.npy``, HDF5:
`distmm.storage.flat`). This works on all machines that see the same folder contents at the same time. Exceptions:

- A network file system may show old names for some seconds (NFS: ``acdirmax``, up to a minute). A process that wakes up
  within this time may still write. A lock is stale only after a minute, so the process has to wake up just then.
- If the file system has no locks of byte ranges, a process that was suspended during a write to a ``.npy`` or HDF5 file
  completes that write when it wakes up. The block that it writes was checked before.
- If the thread that touches the lock was suspended between its check and its touch, and the same number was used again,
  it touches the new lock once. That lock then looks younger.

In an object store ``lock.N`` is an object, which is created by a conditional put. Its owner puts an empty
``lock.N.beat`` instead of touching it. The age of the lock is that of the younger object, by the store's clock.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from distmm.errors import InputError
from distmm.pid import machine, start_time
from distmm.storage.records import records

BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0


@dataclass(frozen=True)
class LockHolder:
    """The owner of a lock: number of the lock file, host, process, token, age in seconds, and whether it is stale."""

    number: int
    host: str
    pid: int
    token: str
    age: float
    stale: bool

    def refuse(self, folder: str) -> None:
        """Raise `InputError` if another job works in this folder."""
        if not self.stale:
            raise InputError(
                f"{folder}: another job works on this output: process {self.pid} on {self.host}, last seen "
                f"{self.age:.0f} s ago; wait for it, or stop it (a dead job is ignored after {STALE_SECONDS:.0f} s)"
            )


def holder(folder: str) -> LockHolder | None:
    """Return the owner of a job's lock. None if there is no lock."""
    numbers = _numbers(folder)
    if not numbers:
        return None
    path = _path(folder, max(numbers))
    try:
        age = records(path).age(path)
        content = _content(path)
    except FileNotFoundError:  # released in the meantime
        return None
    except IsADirectoryError:
        content = {}
    if type(content.get("pid", 0)) is not int:
        content = {}  # not a lock of distmm: it counts as locked until `STALE_SECONDS` after its last change
    pid, token = content.get("pid", 0), str(content.get("token", ""))
    # The file is empty if its owner has not written it yet, or died before.
    stale = age > STALE_SECONDS
    if content.get("machine") == machine():
        stale = content.get("born") != start_time(pid) or (pid == os.getpid() and token not in Lock.held)
    return LockHolder(max(numbers), str(content.get("host", "?")), pid, token, age, stale)


class Lock:
    """The lock of one job folder, from `take` to `release`. A thread touches it regularly.

    Attributes
    ----------
    held : set of str
        Tokens of the locks that this process has. A lock file of this process with another token is a leftover: its
        mount was lost when the lock was released.
    """

    held: ClassVar[set[str]] = set()

    def __init__(self, folder: str, number: int, token: str) -> None:
        self.folder, self.number, self.token = folder, number, token
        self._device = _device(folder)
        self._released = threading.Event()
        self._beat = threading.Thread(target=self._keep_fresh, name="distmm-lock", daemon=True)

    @classmethod
    def take(cls, folder: str) -> Self:
        """Take the lock.

        Raises
        ------
        InputError
            If another job has it.
        """
        if (found := holder(folder)) is not None:
            found.refuse(folder)
        number, token, store = 0 if found is None else found.number + 1, uuid.uuid4().hex, records(folder)
        content = {
            "host": socket.gethostname(), "pid": os.getpid(), "machine": machine(), "born": start_time(os.getpid()),
            "token": token,
        }  # fmt: skip
        try:
            owner = store.own(folder, token)
            try:
                store.create(_path(folder, number), json.dumps(content).encode())
            except BaseException:
                store.remove_folder(owner)
                raise
        except FileExistsError:
            raise InputError(f"{folder}: another job has just locked this output; wait for it") from None
        except FileNotFoundError:  # another job has ended and removed the folder
            raise InputError(f"{folder}: another job has just unlocked this output; call again") from None
        try:
            for old in _numbers(folder):
                if old < number:
                    store.discard(_path(folder, old), owner)
            store.take_over(folder, token)
        except FileNotFoundError:
            raise _lost(folder) from None
        lock = cls(folder, number, token)
        cls.held.add(lock.token)
        lock._beat.start()
        return lock

    @staticmethod
    def check(folder: str, token: str) -> None:
        """Raise InputError if another job has taken over the lock with this token. Called before each write."""
        numbers = _numbers(folder)
        if not numbers or not _is(_path(folder, max(numbers)), token):
            raise _lost(folder)

    def refuse_if_lost(self) -> None:
        """Raise `InputError` if another job has taken over, even if it has ended since. A lost disk raises nothing."""
        try:
            Lock.check(self.folder, self.token)
        except FileNotFoundError:
            if self._device is not None and _device(self.folder) == self._device:
                raise _lost(self.folder) from None
        except OSError:
            return

    def release(self) -> None:
        """Release the lock. Another job may then take it at once."""
        self._released.set()
        self._beat.join()
        self.held.discard(self.token)
        path, owner = _path(self.folder, self.number), os.path.join(self.folder, self.token)
        store = records(self.folder)
        # If another job has taken over, the folder does not exist. If the disk is lost or read-only, another call has
        # already raised an error. A leftover lock file is stale, because its token is no longer in `held`.
        with suppress(OSError):
            if _is(path, self.token):
                store.discard(path, owner)
        store.remove_folder(owner)  # fails silently if there is work in it

    def _keep_fresh(self) -> None:
        """Touch the lock every `BEAT_SECONDS`."""
        while not self._released.wait(BEAT_SECONDS):
            path = _path(self.folder, self.number)
            try:
                if _is(path, self.token):
                    records(path).touch(path)
            except OSError:
                continue  # the mount may come back; otherwise the next write of a block fails with an error


@contextmanager
def locked(folder: str) -> Iterator[Lock]:
    """Take the lock of a job's folder for a ``with`` block. Create the folder, and remove it afterwards if it is empty.

    Raises
    ------
    InputError
        If the folder cannot be created, or another job has the lock.
    """
    try:
        records(folder).make_folder(folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error}; choose another place for C") from error
    lock = Lock.take(folder)
    try:
        yield lock
    finally:
        lock.release()
        records(folder).remove_folder(folder)


def _lost(folder: str) -> InputError:
    return InputError(f"{folder}: another job has taken over this output; this job stops without further writes")


def _device(folder: str) -> int | None:
    """Return the device number of the parent of a job's folder. None if the parent is not on a disk, or is lost."""
    try:
        return os.stat(os.path.dirname(os.path.abspath(folder))).st_dev
    except OSError:
        return None


def _content(path: str) -> dict[str, Any]:
    """Read a lock file. Return an empty dictionary for an empty file, and for a file that is not a lock."""
    try:
        content = json.loads(records(path).read(path))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _is(path: str, token: str) -> bool:
    """Whether a file is the lock with this token."""
    try:
        return _content(path).get("token") == token
    except FileNotFoundError:
        return False


def _path(folder: str, number: int) -> str:
    return os.path.join(folder, f"lock.{number}")


def _numbers(folder: str) -> list[int]:
    return [int(name[5:]) for name in records(folder).names(folder) if re.fullmatch(r"lock\.(0|[1-9][0-9]*)", name)]

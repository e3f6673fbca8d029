"""A lock for the output of a job, for machines that share only a file system, or an object store.

A dead job holds it for at most a minute.

The lock is the file ``lock.N`` with the largest N. It is created with ``O_EXCL``: of several processes one succeeds, on
NFS too. Its owner touches the file every `BEAT_SECONDS`. A lock is *stale* if

- its owner ran on this machine (same host name, boot and process namespace) and that process has ended, or
- its owner ran on another machine, and has not touched the file for `STALE_SECONDS` by the file system's clock.

To take over a stale ``lock.N``, a process creates ``lock.N+1`` and then removes ``lock.N``. Numbers begin at 0 again
after a lock was released. Each file holds a random token that is never used again, the id of the run. If a job was only
suspended while another one took over, its client and its workers find another token, and stop. Workers check the token
before they write a block and before they mark it. The client checks it before C gets its name.

A process may be suspended between such a look and the write that follows. So on a disk the token is also the name of a
folder through which its owner makes every change, and which is renamed by whoever takes over
(`distmm.storage.records`): of the former owner, client or worker, each later open, link, rename and removal fails.
What was open already belongs to no name any more (chunks of Zarr arrays, block rows, JSON: they get their name when
they are whole), or was locked (``.npy``, HDF5: `distmm.storage.flat`). This holds for a client and its workers on any
machine whose view of the folder is that of the others. It does not where

- a network file system shows a machine names for some seconds after another one has changed them (NFS: ``acdirmax``, up
  to a minute): a process that wakes up within this time may still write. A lock is stale after a minute only, so it has
  to wake up just then;
- the file system has no locks of byte ranges: a process that was suspended in the middle of a write to a ``.npy`` or
  HDF5 file ends that write, of a block that was right, when it wakes up;
- the thread that keeps a lock fresh was suspended between its look and its touch, and the number has been used again:
  it touches the new lock once, which is younger by that.

In an object store ``lock.N`` is an object, made by a put that fails where there is one. Its owner puts an empty
``lock.N.beat`` instead of touching it, and the store's clock says how old the later one of the two is.
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

__all__ = ["BEAT_SECONDS", "STALE_SECONDS", "Lock", "holder", "locked"]

BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0


@dataclass(frozen=True)
class LockHolder:
    """Who holds a lock: `number` of the file, host and process, and whether it is stale."""

    number: int
    host: str
    pid: int
    token: str
    age: float
    stale: bool


def holder(folder: str) -> LockHolder | None:
    """Tell who holds the lock of a job; None if nobody does."""
    numbers = _numbers(folder)
    if not numbers:
        return None
    path = _path(folder, max(numbers))
    try:
        age = records(path).age(path)
        content = _content(path)
    except FileNotFoundError:  # released meanwhile
        return None
    except IsADirectoryError:
        content = {}
    if type(content.get("pid", 0)) is not int:
        content = {}  # not a lock of distmm: it counts as held until `STALE_SECONDS` after it was last touched
    pid, token = content.get("pid", 0), str(content.get("token", ""))
    # The file is empty if its owner has not filled it yet, or has died before it did.
    stale = age > STALE_SECONDS
    if content.get("machine") == machine():
        stale = content.get("born") != start_time(pid) or (pid == os.getpid() and token not in Lock.held)
    return LockHolder(max(numbers), str(content.get("host", "?")), pid, token, age, stale)


class Lock:
    """The lock of one job folder, held from `take` to `release`; a thread keeps it fresh.

    Attributes
    ----------
    held : set of str
        Tokens of the locks that this process holds. A lock file of this process with another token was left behind,
        because its mount was gone when the lock was released.
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
            If another job holds it.
        """
        found = holder(folder)
        if found is not None and not found.stale:
            raise InputError(
                f"{folder}: another job works on this output: process {found.pid} on {found.host}, last seen "
                f"{found.age:.0f} s ago; wait for it, or stop it (a dead one is gone after {STALE_SECONDS:.0f} s)"
            )
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
            raise InputError(f"{folder}: another job has taken this output at this moment; wait for it") from None
        except FileNotFoundError:  # that job had nothing to do, or has ended, and has removed the folder
            raise InputError(f"{folder}: another job has left this output at this moment; call again") from None
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
        """Raise if another job has taken over the lock with this token. Called before anything is written."""
        numbers = _numbers(folder)
        if not numbers or not _is(_path(folder, max(numbers)), token):
            raise _lost(folder)

    def refuse_if_lost(self) -> None:
        """Raise `InputError` if another job has taken over, which may have ended since; not if the disk is gone."""
        try:
            Lock.check(self.folder, self.token)
        except FileNotFoundError:
            if self._device is not None and _device(self.folder) == self._device:
                raise _lost(self.folder) from None
        except OSError:
            return

    def release(self) -> None:
        """Release the lock; another job may take it at once."""
        self._released.set()
        self._beat.join()
        self.held.discard(self.token)
        path, store, owner = (
            _path(self.folder, self.number),
            records(self.folder),
            os.path.join(self.folder, self.token),
        )
        # The folder is gone if another job has taken over. If the disk is gone or read-only, another call has already
        # raised an error. A lock file that stays is stale, because its token is no longer in `held`.
        with suppress(OSError):
            if _is(path, self.token):
                store.discard(path, owner)
        store.remove_folder(owner)  # unless there is work in it

    def _keep_fresh(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            path = _path(self.folder, self.number)
            try:
                if _is(path, self.token):
                    records(path).touch(path)
            except OSError:
                continue  # the mount may come back; if it does not, writing a block fails and says so


@contextmanager
def locked(folder: str) -> Iterator[Lock]:
    """Hold the lock of a job's folder. The folder is created if needed, and removed afterwards if it is empty.

    Raises
    ------
    InputError
        If the folder cannot be made, or another job holds the lock.
    """
    try:
        records(folder).make_folder(folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error}; choose another place for C") from error
    lock = Lock.take(folder)
    try:
        yield lock
    finally:
        lock.release()
        records(folder).remove_folder(folder)


def _lost(folder: str) -> InputError:
    return InputError(f"{folder}: another job has taken over this output; this one stops and writes no more")


def _device(folder: str) -> int | None:
    """Return the device of the folder that a job's folder is in; None if that is none of a disk, or is gone."""
    try:
        return os.stat(os.path.dirname(os.path.abspath(folder))).st_dev
    except OSError:
        return None


def _content(path: str) -> dict[str, Any]:
    """Read a lock file; return an empty dictionary for a file that is empty or no lock."""
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

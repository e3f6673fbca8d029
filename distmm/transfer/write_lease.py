"""Leases: other processes may write to this process's memory until the call that allowed it ends.

Writers hold a shared lock on a memory file. The operating system releases the locks of processes that die. So no
process writes after the end of a lease, not even a worker that has lost its scheduler.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Lease:
    """A memory file of process `pid`. It has one byte while writers may start, and is empty afterwards.

    Attributes
    ----------
    pid, fd : int
        Owner, and its file descriptor, by which other processes open the file.
    identity : tuple of int
        Device and inode, since the owner may later use the descriptor for another file.
    """

    pid: int
    fd: int
    identity: tuple[int, int]

    @classmethod
    def begin(cls) -> Lease:
        """Return a new lease of this process. Other processes may write while they hold it."""
        fd = os.memfd_create("distmm-lease")
        os.write(fd, b"1")
        return cls(os.getpid(), fd, _identity(os.fstat(fd)))

    def end(self) -> None:
        """Refuse new writers, and wait for running writes."""
        os.ftruncate(self.fd, 0)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        os.close(self.fd)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lease during the ``with`` block, in any process.

        Raises
        ------
        OSError
            If the lease has ended.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        ended = f"the call that shared the memory of process {self.pid} has ended: nothing more is written there"
        try:
            if _identity(os.stat(path)) != self.identity:
                raise OSError(ended)
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise OSError(ended) from error
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            found = os.fstat(file)
            if _identity(found) != self.identity or not found.st_size:
                raise OSError(ended)
            yield
        finally:
            os.close(file)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino

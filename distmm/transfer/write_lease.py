"""The right of other processes to write into this one's memory: it ends with the call that gave it.

Writers hold a lock of a file without a name, which the system takes from processes that die. So the end of a call is
sure that nobody writes any more, also no worker that the scheduler has lost and that nobody can ask.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Lease"]


@dataclass(frozen=True)
class Lease:
    """A file in the memory of process `pid`: it has one byte while writers may begin, and none afterwards.

    Attributes
    ----------
    pid, fd
        Where other processes find it.
    identity : tuple of int
        Device and inode: the number of a closed file may soon be that of another.
    """

    pid: int
    fd: int
    identity: tuple[int, int]

    @classmethod
    def begin(cls) -> Lease:
        """Let processes that know of this lease write."""
        fd = os.memfd_create("distmm-lease")
        os.write(fd, b"1")
        return cls(os.getpid(), fd, _identity(os.fstat(fd)))

    def end(self) -> None:
        """Let nobody begin to write any more, and wait for those who do."""
        os.ftruncate(self.fd, 0)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        os.close(self.fd)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write meanwhile, in any process.

        Raises
        ------
        OSError
            If the lease has ended.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        ended = f"the call that lent the memory of process {self.pid} has ended: nothing more is written there"
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

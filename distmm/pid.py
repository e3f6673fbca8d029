"""Identity of processes: a process number is valid within one boot and PID namespace, and is reused later."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


def machine() -> str:
    """Return an identifier of this host, boot and PID namespace, within which process numbers are valid."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # not Linux: the host name alone
    return " ".join(parts)


def this_process() -> tuple[int, str | None]:
    """Return the number of this process, and when it was started (`start_time`)."""
    return os.getpid(), _started(os.getpid())


def start_time(pid: int) -> str | None:
    """Return when a process of this machine was started, in clock ticks since the boot; None if it has ended.

    A zombie, whose exit code its parent has not read yet, counts as ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # other errors leave open whether the process exists
        return None
    return None if fields[0] in "ZX" else fields[19]


_started = functools.cache(start_time)  # of this process: a fork has another number

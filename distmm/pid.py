"""What a process number means: it counts within one boot and one namespace of a machine, and is used again."""

from __future__ import annotations

import os
import socket

__all__ = ["born", "machine"]


def machine() -> str:
    """Identify the set of processes that a process number belongs to."""
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # not Linux: the host name is what there is
    return " ".join(parts)


def born(pid: int) -> str | None:
    """Tell when a process of this machine was started; None if it is gone, be its exit code still there or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # anything else says nothing of the process
        return None
    return None if fields[0] in "ZX" else fields[19]

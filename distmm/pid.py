"""Process numbers: they are valid within one boot and one namespace of a machine, and are used again."""

from __future__ import annotations

import os
import socket

__all__ = ["machine", "start_time"]


def machine() -> str:
    """Identify the boot and the namespace within which process numbers are valid."""
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # not Linux: the host name is what there is
    return " ".join(parts)


def start_time(pid: int) -> str | None:
    """Return when a process of this machine was started, in clock ticks since the boot; None if it has ended.

    A process has ended also if nobody has taken its exit code yet.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # other errors do not tell whether there is one
        return None
    return None if fields[0] in "ZX" else fields[19]

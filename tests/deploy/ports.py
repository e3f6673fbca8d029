"""Ports for programs that must be told theirs."""

from __future__ import annotations

import os
import socket


def free_ports(count: int) -> list[int]:
    """Find consecutive free ports, of those that the kernel gives nobody by itself: it could give them away meanwhile.

    Each process of tests looks from another one on.
    """
    last = 32000  # Linux gives away those from 32768 on
    for first in [*range(10000 + os.getpid() * 16 % 20000, last, 16), *range(10000, last, 16)]:
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + offset))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")

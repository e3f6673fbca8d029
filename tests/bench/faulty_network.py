"""Hosts on one machine, each in a network namespace of its own, with a network that delays, loses and cuts off.

Each host has one TUN device. All packets that leave one come to this process, which drops them, or hands them to the
device of the host that they are for, at once or later. So a fault is a line in a table, for each direction of each pair
of hosts by itself. Nothing else is connected to these namespaces, and the machine's own network is not touched. With
the process the devices are gone, with `Network.close` the namespaces too.

It needs root, `ip` (Debian's iproute2) and ``/dev/net/tun``; it does without the kernel's own netem.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

__all__ = ["Link", "Network", "enter", "missing"]

# From Linux' <sched.h> and <linux/if_tun.h>.
CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 0x1, 0x1000

DEVICE = "/dev/net/tun"
MTU = 16000  # few packets: each costs this process some 20 us
PREFIX = "10.213.77."


def missing() -> str | None:
    """Say what this machine lacks; None if hosts can be made here."""
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    if shutil.which("ip") is None:
        return "there is no ip (Debian's iproute2)"
    if not os.path.exists(DEVICE):
        return f"there is no {DEVICE}"
    name = f"distmm-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"ip netns add: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def enter(namespace: str) -> None:
    """Move this thread, and all that it will start, into a namespace."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Link:
    """What happens to packets in one direction: a delay in seconds, and the share that is lost."""

    delay: float = 0.0
    loss: float = 0.0


class Network:
    """Some hosts, and the links between them.

    Parameters
    ----------
    names : iterable of str
        Of the hosts.
    seed : int
        Of what is lost.

    Attributes
    ----------
    addresses, namespaces : dict of str
        By host.
    links : dict
        What is not as it should be, by the two hosts, sender first.
    packets : Counter
        What became of packets: "delivered", "delayed", "lost".
    """

    def __init__(self, names: Iterable[str], seed: int = 0) -> None:
        names = list(names)
        self.addresses = {name: f"{PREFIX}{number}" for number, name in enumerate(names, 1)}
        self.namespaces = {name: f"distmm-{os.getpid()}-{name}" for name in names}
        self.links: dict[tuple[str, str], Link] = {}
        self.packets: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._devices: dict[str, int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="network", daemon=True)

    def __enter__(self) -> Self:
        try:
            for name in self.namespaces:
                self._add(name)
        except BaseException:
            self.close()
            raise
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all that was made."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        for device in self._devices.values():
            os.close(device)
        self._devices.clear()
        for namespace in self.namespaces.values():
            if os.path.exists(f"/run/netns/{namespace}"):
                subprocess.run(["ip", "netns", "del", namespace], check=True)

    def heal(self) -> None:
        """Let all packets through at once."""
        self.links.clear()

    def _add(self, name: str) -> None:
        namespace = self.namespaces[name]
        subprocess.run(["ip", "netns", "add", namespace], check=True)
        # The device belongs to the namespace of the thread that makes it.
        made = threading.Thread(target=self._make_device, args=(name,))
        made.start()
        made.join()
        for command in (
            "link set lo up", f"link set tun0 mtu {MTU} up", f"addr add {self.addresses[name]}/24 dev tun0",
        ):  # fmt: skip
            subprocess.run(["ip", "-n", namespace, *command.split()], check=True)

    def _make_device(self, name: str) -> None:
        enter(self.namespaces[name])
        self._devices[name] = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self._devices[name], TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))

    def _forward(self) -> None:
        """Hand packets on, until `close`."""
        hosts = {bytes(map(int, address.split("."))): name for name, address in self.addresses.items()}
        senders = {device: name for name, device in self._devices.items()}
        late: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        while not self._closed.is_set():
            wait = min(0.05, max(0.0, late[0][0] - time.monotonic())) if late else 0.05
            for device in select.select(list(senders), [], [], wait)[0]:
                with suppress(BlockingIOError):
                    packet = os.read(device, MTU + 100)
                    to = hosts.get(packet[16:20])
                    if packet[0] >> 4 != 4 or to is None:  # IPv6, multicast
                        continue
                    link = self.links.get((senders[device], to), Link())
                    if self._random.random() < link.loss:
                        self.packets["lost"] += 1
                    elif link.delay:
                        self.packets["delayed"] += 1
                        due = time.monotonic() + link.delay
                        heapq.heappush(late, (due, next(order), self._devices[to], packet))
                    else:
                        self.packets["delivered"] += 1
                        self._deliver(self._devices[to], packet)
            while late and late[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(late)
                self._deliver(device, packet)

    @staticmethod
    def _deliver(device: int, packet: bytes) -> None:
        with suppress(OSError):  # its queue is full: a real network drops packets, too
            os.write(device, packet)

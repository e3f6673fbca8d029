"""What a worker does for a product, its totals, and what goes wrong meanwhile. Times are since the epoch."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

# "multiply": a step of a chain. "receive": inputs from a peer. "load": a block of A or B from a file. "operands": other
# tasks that A and B are made by. "write": a block of C was checked, reduced or written. "other": tasks of others.
Kind = Literal["multiply", "receive", "load", "operands", "write", "other"]


class Activity(NamedTuple):
    """What a worker did from `start` to `stop`."""

    worker: str
    kind: Kind
    start: float
    stop: float


class Device(NamedTuple):
    """NVML's figures of a GPU: bytes that all processes use, bytes of memory, fraction of time with a kernel."""

    used: int
    total: int
    utilization: float


# Incidents kept for display. The first ones show the cause, so later ones are dropped.
MOST_INCIDENTS = 200

# Equal incidents within so many seconds count as one.
MOMENT_SECONDS = 5.0

# Most points of a trace: two traces of 256 workers fill 25 MB.
MOST_POINTS = 512


class Trace:
    """Values of a quantity over time. When there are too many, every second one is dropped."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []  # time, value
        self.stride, self.count = 1, 0  # every n-th value is kept; number of all values

    def add(self, time: float, value: float) -> None:
        """Add the value at a time that is not before the last one."""
        if (self.count - 1) % self.stride:
            self.points.pop()  # it was kept as the last value
        self.points.append((time, value))
        self.count += 1
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self.stride *= 2

    def at(self, times: np.ndarray) -> np.ndarray:
        """Return the values at these times, linear between two of the trace; 0 before the first one."""
        at, values = np.array(self.points or [(0.0, 0.0)]).T
        return np.interp(times, at, values, left=0.0)


@dataclass
class Lane:
    """Totals of one worker, and traces of its work and memory. Times are seconds since the epoch."""

    host: str = ""
    flops: float = 0.0
    steps: int = 0
    # Seconds of each kind. "multiply" is the time with at least one step running. Other kinds are sums over threads.
    seconds: defaultdict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    until: float = 0.0  # end of the last step
    measured: tuple[float, float] = (0.0, 0.0)  # operations and seconds of the steps that no silence interrupted
    silences: list[tuple[float, float]] = field(default_factory=list)  # from when to when; the end is infinite at first
    received: int = 0
    receiving: float = 0.0  # seconds that the bytes received took
    lost: float | None = None  # when the worker left for the first time
    device: Device | None = None
    peak_blocks: int = 0
    peak_process: int = 0  # of the GPU, where there is one
    others: int = 0  # bytes of blocks that are not the product's
    work: Trace = field(default_factory=Trace)  # operations so far
    blocks: Trace = field(default_factory=Trace)  # bytes of blocks

    @property
    def silent_since(self) -> float | None:
        """Time of the last heartbeat of a worker that is silent now; None if it is not."""
        return self.silences[-1][0] if self.silences and self.silences[-1][1] == math.inf else None

    @property
    def busy_rate(self) -> float:
        """FLOP/s in the time with at least one step running."""
        flops, seconds = self.measured
        return flops / seconds if seconds else 0.0

    def asleep(self, start: float, stop: float) -> float:
        """Return for how many seconds of an interval the worker was silent."""
        return sum(max(0.0, min(stop, end) - max(start, begin)) for begin, end in self.silences)

    def step(self, start: float, stop: float, flops: float) -> None:
        """Add a step of a chain; steps overlap where products are queued ahead."""
        start = min(stop, max(start, self.until))
        asleep = self.asleep(start, stop)
        if start + asleep > self.until:
            self.work.add(start + asleep, self.flops)
        self.until = max(self.until, stop)
        self.flops += flops
        self.work.add(self.until, self.flops)
        self.steps += 1
        self.seconds["multiply"] += stop - start - asleep
        if not asleep:
            self.measured = self.measured[0] + flops, self.measured[1] + stop - start

    def sample(
        self, time: float, blocks: int, process: int, received: int = 0, device: Device | None = None, others: int = 0,
        receiving: float = 0.0, host: str = "",
    ) -> None:  # fmt: skip
        """Add the figures of a heartbeat.

        Parameters
        ----------
        time : float
        blocks, others : int
            Bytes of the product's blocks in memory, as its plan counts them: without operands that stay in memory. And
            those of all other blocks.
        process : int
            Memory of the process in bytes.
        received, receiving : int, float
            Bytes received for the product since the last heartbeat, and the seconds that the worker spent receiving.
        device, host
            The worker's GPU, and the name of its host.
        """
        self.host, self.device, self.others = host or self.host, device or self.device, others
        self.received += received
        self.receiving += receiving
        self.peak_blocks = max(self.peak_blocks, blocks)
        self.peak_process = max(self.peak_process, device.used if device else process)
        self.blocks.add(time, blocks)


@dataclass
class Incident:
    """A fault at a time (seconds since the epoch), and how often it occurred then."""

    time: float
    what: str
    count: int = 1

    def __str__(self) -> str:
        return self.what if self.count == 1 else f"{self.count} x {self.what}"


class Incidents(list[Incident]):
    """The incidents of a product, in order of time."""

    def add(self, time: float, what: str) -> Incident:
        """Add an incident. Equal ones close in time are counted together: a lost worker interrupts many steps."""
        for incident in self[-3:]:
            if incident.what == what and time - incident.time < MOMENT_SECONDS:
                incident.count += 1
                return incident
        incident = Incident(time, what)
        if len(self) < MOST_INCIDENTS:
            self.append(incident)
        return incident

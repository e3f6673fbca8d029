"""What workers do for a product, what goes wrong, and the figures of heartbeats. Times are seconds since the epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

# Topic of Dask's structured events by which jobs report what the scheduler cannot see. Each message is a dictionary
# with "event", "job" and further keys:
#   "begin"                  "path", "kept" (blocks on disk), "note" (an incident before the start), "verb" ("topk")
#   "wave"                   "product": this product is a wave of the job
#   "accepted", "rejected"   "blocks" (rows and columns): results of checks
#   "failed"                 "error": the client found a failure, such as a wrong C
JOB_TOPIC = "distmm-job"

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


class Load(NamedTuple):
    """CPU seconds so far: of the worker's process, and of all processes on its host; and the host's cores."""

    process: float
    host: float
    cores: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of a worker's heartbeat, in bytes and seconds.

    Attributes
    ----------
    time, worker
    blocks : int
        Bytes of the product's blocks in memory, as its plan counts them: without operands that stay in memory.
    others : int
        Bytes of all other blocks in memory.
    process : int
        Memory of the process.
    received, receiving : int, float
        Bytes received for the product since the last sample, and the time that the worker spent receiving.
    device, load, host
        Its GPU, CPU time, and the name of its host.
    """

    time: float
    worker: str
    blocks: int
    process: int
    received: int = 0
    device: Device | None = None
    others: int = 0
    receiving: float = 0.0
    load: Load | None = None
    host: str = ""


# Incidents kept for display. The first ones show the cause, so later ones are dropped.
MOST_INCIDENTS = 200

# Equal incidents within so many seconds count as one.
MOMENT_SECONDS = 5.0


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

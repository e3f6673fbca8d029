"""Events: what happens to a product while it runs.

The scheduler's plugin (`distmm.telemetry.scheduler`) makes events, and `distmm.telemetry.record.Record` sums them up.
Dashboard, Prometheus, progress and report read that record. Times are seconds since the epoch by the scheduler's clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

__all__ = [
    "JOB_TOPIC",
    "Access",
    "Again",
    "Checked",
    "Device",
    "Dropped",
    "Event",
    "Failed",
    "Heard",
    "Noted",
    "Retried",
    "Sample",
    "StepRun",
    "Transfer",
    "Unwritten",
    "WorkerLeft",
]

# Topic of Dask's structured events by which jobs report what the scheduler cannot see. Each message is a dictionary
# with "event", "job" and further keys:
#   "begin"                "path", "kept" (blocks on disk), "note" (an incident before the start)
#   "wave"                 "product": this product is a wave of the job
#   "certified", "certificate-failure"    "blocks" (rows and columns): results of checks
#   "failed"               "error": the client found a failure, such as a wrong C
JOB_TOPIC = "distmm-job"


class Event:
    """What a record is told: one of the classes below."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StepRun(Event):
    """A worker computed a step of a chain."""

    chain: int
    step: int
    worker: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Transfer(Event):
    """A worker received inputs of a step from a peer."""

    worker: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Access(Event):
    """A worker read or made a block of A or B; with `writes`, it checked, reduced and wrote a block of C."""

    worker: str
    writes: bool
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Again(Event):
    """A step has to run again. With `finished`, its result was lost with a worker; else its run had no result."""

    time: float
    chain: int
    step: int
    finished: bool


@dataclass(frozen=True, slots=True)
class WorkerLeft(Event):
    """A worker left the cluster while the product ran."""

    time: float
    worker: str


@dataclass(frozen=True, slots=True)
class Dropped(Event):
    """A step was cancelled: no client needs its result any more."""

    time: float
    chain: int
    step: int


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A task failed after all retries: a step, or a task that loads, checks or writes a block. The product fails too.

    `cause` is the key of the task, `what` names it for people. Several events with the same cause count as one failure:
    all steps that need a block fail with the task that loads it.
    """

    time: float
    cause: Hashable
    what: str
    error: str


@dataclass(frozen=True, slots=True)
class Unwritten(Event):
    """Number of submitted tasks that check, reduce or write blocks of C and have not finished."""

    time: float
    tasks: int


@dataclass(frozen=True, slots=True)
class Heard(Event):
    """Time of the last heartbeat of each worker of the cluster, by name."""

    seen: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Retried(Event):
    """A failed task will run again because a client asked for it."""

    time: float
    cause: Hashable


@dataclass(frozen=True, slots=True)
class Noted(Event):
    """An incident that no other event describes."""

    time: float
    what: str


@dataclass(frozen=True, slots=True)
class Device:
    """NVML's figures of a GPU: bytes that all processes use, bytes of memory, fraction of time with a kernel."""

    used: int
    total: int
    utilization: float


@dataclass(frozen=True, slots=True)
class Sample(Event):
    """Figures of a heartbeat, in bytes.

    `blocks` counts blocks in memory, without those from before the product. `process` is the memory of the process.
    `received` counts the blocks received for the product since the last sample.
    """

    time: float
    worker: str
    blocks: int
    process: int
    received: int
    device: Device | None = None


@dataclass(frozen=True, slots=True)
class Checked(Event):
    """A job has checked the block of a chain."""

    time: float
    chain: int
    passed: bool

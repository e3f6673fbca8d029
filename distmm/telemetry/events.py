"""Events: what happens to a product while it runs.

The scheduler's plugin (`distmm.telemetry.scheduler`) makes them and `distmm.telemetry.record.Record` sums them up.
Dashboard, Prometheus, progress and report read that record. Times are seconds since 1970 by the scheduler's clock.
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

# Jobs say what the scheduler cannot see as Dask's structured events under this topic: dictionaries with "event" and
# "job". "begin" ("path", "kept": blocks on disk, "note": an incident before) and "wave" ("product") say which products
# belong to a job; "certified" and "certificate-failure" ("blocks": rows and columns) are the results of checks.
# "failed" ("error") ends a job that found the failure itself, such as a C that is wrong.
JOB_TOPIC = "distmm-job"


@dataclass(frozen=True, slots=True)
class StepRun:
    """A worker computed a step of a chain."""

    chain: int
    step: int
    worker: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """A worker received inputs of a step from a peer."""

    worker: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Access:
    """A worker read or made a block of A or B, or judged, reduced and wrote a block of C (`writes`)."""

    worker: str
    writes: bool
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Again:
    """A step has to run again: its result was lost with a worker (`finished`), or it ended without a result."""

    time: float
    chain: int
    step: int
    finished: bool


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker left the cluster while the product ran."""

    time: float
    worker: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A step was given up: nobody wants its result any more."""

    time: float
    chain: int
    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A task failed for good, and the product with it: a step, or a task that loads, judges or writes a block.

    `cause` is the key of the task. Several events of one cause are one failure: all steps that need a block fail with
    the task that loads it.
    """

    time: float
    cause: Hashable
    what: str
    error: str


@dataclass(frozen=True, slots=True)
class Unwritten:
    """How many tasks that judge, reduce or write blocks of C are still to be done, of those that have come."""

    time: float
    tasks: int


@dataclass(frozen=True, slots=True)
class Heard:
    """When each worker of the cluster was last heard of, by name."""

    seen: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Retried:
    """A task that had failed is to run again, since a client has asked for that."""

    time: float
    cause: Hashable


@dataclass(frozen=True, slots=True)
class Noted:
    """Something that people should know of, and that nothing else tells."""

    time: float
    what: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as NVML sees it: bytes that all processes use, bytes of memory, fraction of time with a kernel running."""

    used: int
    total: int
    utilization: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A heartbeat: bytes of blocks beyond those before the product, of the process, and received for the product."""

    time: float
    worker: str
    blocks: int
    process: int
    received: int
    device: Device | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """A job has compared the block that a chain made with its certificate."""

    time: float
    chain: int
    passed: bool


Event = (
    StepRun
    | Transfer
    | Access
    | Again
    | WorkerLeft
    | Dropped
    | Failed
    | Retried
    | Unwritten
    | Heard
    | Sample
    | Checked
    | Noted
)

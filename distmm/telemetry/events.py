"""What happens to a product while it runs: a handful of facts, each said once.

The scheduler's plugin (`distmm.telemetry.scheduler`) states them, a `distmm.telemetry.record.Record` adds them up, and
dashboard, Prometheus, progress and report read that record. All times are seconds since 1970 by the scheduler's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TOPIC", "Again", "Checked", "Device", "Dropped", "Event", "Left", "Run", "Sample", "Transfer"]

# Topic of Dask's structured events under which jobs say what the scheduler cannot see: dictionaries with "event" and
# "job". "begin" ("path", "kept": blocks on disk) and "wave" ("product") tell which products are one; "certified" and
# "certificate-failure" ("i", "j") tell of checks.
TOPIC = "distmm-job"


@dataclass(frozen=True, slots=True)
class Run:
    """A step of a chain was computed: by whom, from when to when."""

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
class Again:
    """A step has to run again: its result was lost with a worker (`finished`), or a run of it ended without one."""

    time: float
    chain: int
    step: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Left:
    """A worker left the cluster while the product ran."""

    time: float
    worker: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A step was given up: it failed for good, or nobody wants its result any more (`error` is empty then)."""

    time: float
    chain: int
    step: int
    error: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as NVML sees it: bytes in use by all processes, bytes in all, fraction of the time that a kernel ran."""

    used: int
    total: int
    utilization: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What a heartbeat says: bytes in blocks since the product came, in the process, received for it, and the GPU."""

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


Event = Run | Transfer | Again | Left | Dropped | Sample | Checked

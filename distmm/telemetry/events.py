"""What happens to a product while it runs: a handful of facts, each said once.

The scheduler's plugin (`distmm.telemetry.scheduler`) states them, a `distmm.telemetry.record.Record` adds them up, and
dashboard, Prometheus, progress and report read that record. All times are seconds since 1970 by the scheduler's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["TOPIC", "Again", "Device", "Dropped", "Event", "Left", "Note", "Run", "Sample", "Transfer"]

# Topic of Dask's structured events under which jobs and workers report what the scheduler cannot see (`Note`).
TOPIC = "distmm"


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
    """What a heartbeat says: bytes in blocks and in the process, bytes received for the product since the last, GPU."""

    time: float
    worker: str
    blocks: int
    process: int
    received: int
    device: Device | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """What a job reports about its product.

    "resumed": `chains` were on disk already; "certified": `chains` passed their check; "refuted": they failed it.
    """

    time: float
    kind: Literal["resumed", "certified", "refuted"]
    chains: tuple[int, ...]
    message: str = ""


Event = Run | Transfer | Again | Left | Dropped | Sample | Note

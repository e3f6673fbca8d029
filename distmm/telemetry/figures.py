"""The figures of a product that page, terminal, metrics and report show: each has this one source. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from distmm.telemetry import liveness, slowness

if TYPE_CHECKING:
    from distmm.telemetry.record import Record

# States of a product that has not ended. The other states are "complete", "failed" and "cancelled".
UNDER_WAY = ("waiting", "running", "stalled")

# States that the page shows in red.
ALARMING = ("failed", "cancelled", "stalled")


class Figures:
    """The progress of a product, as plain values, which the scheduler sends to clients.

    Attributes
    ----------
    done, total : int
        Steps that are done, and all steps.
    blocks_done, blocks : int
        Blocks of C that are done, and all blocks.
    flops, seconds, rate : float
        Operations so far; seconds since the product was submitted, until its last step, check or write; FLOP/s from the
        first step on, until the last one.
    left : float
        Seconds left at the recent rate (`distmm.telemetry.time_left`); for a job, until the last block is checked and
        on disk. Infinite before the first step, and while the product is stalled.
    moved, bound : int
        Bytes that workers received from others for this product, and the lower bound of a 2-D product.
    again, interrupted : int
        Results of steps that were lost and computed again; runs of steps that ended without a result.
    failed : int
        Tasks that failed after all retries.
    resumed : int
        Blocks of C that were on disk before.
    refuted : int
        Blocks of C whose last check failed.
    state : {"waiting", "running", "stalled", "complete", "failed", "cancelled"}
    error : str
        The first failure, if the state is "failed".
    workers, planned : int
        Workers that send heartbeats, and workers of the plan.
    idle : float
        Seconds since the last step, check or write.
    silent : float
        Seconds since the last heartbeat, of the worker for which this is longest.
    verb : str
        What is done with C: "topk", "nearest", "threshold"; empty where it is C that is wanted.
    reasons : list of str
        Why it is slower than its plan (`distmm.telemetry.slowness`).
    unwritten : int
        Submitted tasks that check, reduce or write blocks of C and have not finished.
    """

    def __init__(self, record: Record, now: float) -> None:
        """Take the figures of a record at the time `now` (seconds since the epoch)."""
        expected, seen, pace = record.expected, record.seen, record.pace
        flops, remaining = (float(record.step_flops[steps].sum()) for steps in (record.done, expected & ~record.done))
        begun = record.started if record.started is not None else math.inf
        computing = max(0.0, (record.stopped if record.over and record.stopped else now) - begun)
        self.done, self.total = int(record.done.sum()), int(expected.sum())
        self.blocks_done, self.blocks = int(np.count_nonzero(record.progress == 1)), record.chains
        self.flops, self.rate = flops, flops / computing if computing else 0.0
        self.seconds = max(0.0, record.end(now) - record.submitted)
        self.moved = sum(lane.received for lane in record.lanes.values())
        self.bound = record.plan.cost.bytes_bound
        self.again, self.interrupted = int(record.again.sum()), record.interrupted
        self.failed, self.error = record.failed, next(iter(record.failures.values()), "")
        self.resumed, self.refuted = int(record.resumed.sum()), int(record.refuted.sum())
        self.planned = self.workers = record.plan.grid.size
        if seen is not None:
            self.workers = liveness.heard_of(self.planned, record.lanes, seen, now)
        self.idle = max(0.0, now - record.advanced)
        self.silent = max((now - at for name, at in (seen or {}).items() if name in record.lanes), default=math.inf)
        stalled = not record.over and liveness.stalled(self.workers, self.idle, pace.pause if pace else None)
        self.state = "stalled" if stalled else record.state
        self.left = math.inf if stalled or pace is None else 0.0
        if remaining and pace is not None and not stalled:
            self.left = pace.left(now, remaining) + record.afterwards
        self.verb, self.unwritten = record.verb, record.unwritten
        self.reasons = slowness.reasons(record, self, now)

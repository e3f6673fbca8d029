"""The figures of a product that page, terminal, metrics and report show: each has this one source. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distmm.telemetry import liveness, slowness

if TYPE_CHECKING:
    from distmm.telemetry.record import Record

# States of a product that has not ended. The other states are "complete", "failed" and "cancelled".
UNDER_WAY = ("waiting", "running", "stalled")

# States that the page shows in red.
ALARMING = ("failed", "cancelled", "stalled")


class Figures(NamedTuple):
    """The progress of a product.

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
    reasons : tuple of str
        Why it is slower than its plan (`distmm.telemetry.slowness`).
    unwritten : int
        Submitted tasks that check, reduce or write blocks of C and have not finished.
    """

    done: int
    total: int
    blocks_done: int
    blocks: int
    flops: float
    seconds: float
    rate: float
    left: float
    moved: int
    bound: int
    again: int
    interrupted: int
    failed: int
    resumed: int
    refuted: int
    state: str
    error: str = ""
    workers: int = 0
    planned: int = 0
    idle: float = 0.0
    silent: float = math.inf
    verb: str = ""
    reasons: tuple[str, ...] = ()
    unwritten: int = 0

    @classmethod
    def of(cls, record: Record, now: float) -> Figures:
        """Return the figures of a record at the time `now` (seconds since the epoch)."""
        expected, seen = record.expected, record.seen
        flops, remaining = (float(record.step_flops[steps].sum()) for steps in (record.done, expected & ~record.done))
        begun = record.started if record.started is not None else math.inf
        computing = max(0.0, (record.stopped if record.over and record.stopped else now) - begun)
        planned = record.plan.grid.size
        workers = planned if seen is None else liveness.heard_of(planned, record.lanes, seen, now)
        idle = max(0.0, now - record.advanced)
        stalled = not record.over and liveness.stalled(workers, idle, record.pace.pause if record.pace else None)
        left = math.inf if stalled or record.pace is None else 0.0
        if remaining and record.pace is not None and not stalled:
            left = record.pace.left(now, remaining) + record.afterwards
        figures = cls(
            done=int(record.done.sum()),
            total=int(expected.sum()),
            blocks_done=int(np.count_nonzero(record.progress == 1)),
            blocks=record.chains,
            flops=flops,
            seconds=max(0.0, record.end(now) - record.submitted),
            rate=flops / computing if computing else 0.0,
            left=left,
            moved=sum(lane.received for lane in record.lanes.values()),
            bound=record.plan.cost.bytes_bound,
            again=int(record.again.sum()),
            interrupted=record.interrupted,
            failed=record.failed,
            resumed=int(record.resumed.sum()),
            refuted=int(record.refuted.sum()),
            state="stalled" if stalled else record.state,
            error=next(iter(record.failures.values()), ""),
            workers=workers,
            planned=planned,
            idle=idle,
            silent=max((now - at for name, at in (seen or {}).items() if name in record.lanes), default=math.inf),
            verb=record.verb,
            unwritten=record.unwritten,
        )
        return figures._replace(reasons=tuple(slowness.reasons(record, figures, now)))

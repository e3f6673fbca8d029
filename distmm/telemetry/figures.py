"""The figures of a product that page, terminal, metrics and report show: each has this one source. Pure.

They say which workers are silent, whether the product is stalled, and why it is slower than its plan.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from distmm import units
from distmm.telemetry import theme

if TYPE_CHECKING:
    from distmm.telemetry.activity import Kind, Lane
    from distmm.telemetry.record import Record

# States of a product that has not ended. The other states are "complete", "failed" and "cancelled".
UNDER_WAY = ("waiting", "running", "stalled")

# States that the page shows in red.
ALARMING = ("failed", "cancelled", "stalled")

# A worker is silent after so many seconds without a heartbeat, plus so many for each worker of the cluster. Heartbeats
# come every 0.5 s, and every n / 200 + 1 seconds from many workers.
SILENT_SECONDS, SILENT_SECONDS_A_WORKER = 15.0, 0.02

# A product is stalled after so many seconds without a step, check or write, if that is also this many times its longest
# pause so far.
STALLED_SECONDS, STALLED_PAUSES = 20.0, 3.0

# A product is slow if its time, or its workers' rate, misses the plan by this factor. So are links.
MISSED = 1.2

# Seconds by which a product has to be late. Small products take longer than planned, because tasks have to be sent.
LATE_SECONDS = 1.0

# A worker is slow below this fraction of the median worker's rate.
SLOW_WORKER = 0.75

# Least fraction of the workers' time, and of all steps, that is worth a sentence.
SHARE, REPEATED = 0.1, 0.05

# Tasks that are no steps, and whose share of the workers' time is said.
TASKS: tuple[Kind, ...] = ("operands", "load", "write")


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
        Why it is slower than its plan (`reasons`).
    unwritten : int
        Submitted tasks that check, reduce or write blocks of C and have not finished.
    """

    def __init__(self, record: Record, now: float) -> None:
        """Take the figures of a record at the time `now` (seconds since the epoch)."""
        expected, seen, pace = record.expected, record.seen, record.pace
        flops, remaining = (float(record.step_flops[steps].sum()) for steps in (record.done, expected & ~record.done))
        computing = 0.0 if pace is None else max(0.0, (pace.times[-1] if record.over else now) - pace.times[0])
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
            self.workers = heard_of(self.planned, record.lanes, seen, now)
        self.idle = max(0.0, now - record.advanced)
        self.silent = max((now - at for name, at in (seen or {}).items() if name in record.lanes), default=math.inf)
        is_stalled = not record.over and stalled(self.workers, self.idle, pace.pause if pace else None)
        self.state = "stalled" if is_stalled else record.state
        self.left = math.inf if is_stalled or pace is None else 0.0
        if remaining and pace is not None and not is_stalled:
            self.left = pace.left(now, remaining) + record.afterwards
        self.verb, self.unwritten = record.verb, record.unwritten
        self.reasons = reasons(record, self, now)


def silent(seen: Mapping[str, float], now: float) -> set[str]:
    """Return the workers that are silent, of all that have not left; `seen` has the time of their last heartbeat."""
    limit = SILENT_SECONDS + SILENT_SECONDS_A_WORKER * len(seen)
    return {name for name, at in seen.items() if now - at > limit}


def heard_of(planned: int, used: Iterable[str], seen: Mapping[str, float], now: float) -> int:
    """Return how many of a plan's workers are connected and not silent.

    Parameters
    ----------
    planned : int
        Number of workers in the plan.
    used : iterable of str
        Names of the workers that own blocks of the product, or have computed some.
    seen : mapping
        Time of the last heartbeat by name of the worker, for all workers that have not left the cluster.
    now : float
        Seconds since the epoch.

    Notes
    -----
    A worker that the product does not use yet replaces a worker that has left. It does not replace a silent one: the
    scheduler moves the tasks only after it has removed the silent worker.
    """
    used, quiet = set(used), silent(seen, now)
    spare = len(seen.keys() - used - quiet)
    gone = max(planned - len(used & seen.keys()), 0)
    return max(0, planned - len(used & quiet) - max(0, gone - spare))


def stalled(workers: int, idle: float, pause: float | None) -> bool:
    """Whether a product is stalled.

    Parameters
    ----------
    workers : int
        Number of workers that send heartbeats (`heard_of`).
    idle : float
        Seconds since the last step, check or write.
    pause : float or None
        The longest time between two steps so far. None before the first step, which may wait for slow reads.
    """
    return not workers or (pause is not None and idle > max(STALLED_SECONDS, STALLED_PAUSES * pause))


def reasons(record: Record, f: Figures, now: float) -> list[str]:
    """Return why a product runs, or ran, below the rate of its plan; empty if it runs as planned.

    Parameters
    ----------
    record : Record
    f : Figures
        Figures of the record at the time `now`; their own reasons are not used.
    now : float
        Seconds since the epoch.
    """
    lanes = {name: lane for name, lane in record.lanes.items() if name}
    found = [
        f"{record.named(name)} has been silent since {units.clock(lane.silent_since)}"
        for name, lane in lanes.items()
        if lane.silent_since is not None and not record.over
    ]
    if f.workers < f.planned and not record.over:
        found.append(f"{f.workers} of {f.planned} workers are heard of")
    rates = {name: lane.busy_rate for name, lane in lanes.items() if lane.busy_rate}
    median = statistics.median(rates.values()) if rates else record.plan.cluster.rate
    if rates and (rate := rates[slowest := min(rates, key=rates.__getitem__)]) < SLOW_WORKER * median:
        found.append(f"{record.named(slowest)} computes at {rate / median:.0%} of the median worker's rate")
    if f.again > REPEATED * f.total:
        found.append(f"{f.again} of {f.total} steps were lost and computed again")
    not_on_disk = float(record.computed.sum() / max(1, (~record.mirrored).sum()))
    planned = record.plan.cost.seconds * not_on_disk
    expected = f.seconds + (f.left if math.isfinite(f.left) else 0.0)
    late = expected > max(MISSED * planned, planned + LATE_SECONDS)
    weak = f.seconds > LATE_SECONDS and median * MISSED < record.plan.cluster.rate
    if late or weak:
        found += _causes(record, f, lanes, now)
    if weak:
        found.append(f"while they compute, workers reach {median / record.plan.cluster.rate:.0%} of the plan's rate")
    if late and not found:
        share = _share(lanes, "multiply", f.seconds)
        why = f"workers compute for {share:.0%} of the time, and wait for most of the rest"
        why = why if rates else "no product of blocks has ended so far"
        found.append(f"it takes {units.duration(expected)}, {units.duration(planned)} were planned: {why}")
    if record.refutations:
        found.append(f"checks that failed: {record.refutations}; such blocks are computed again")
    return found


def _share(lanes: Mapping[str, Lane], kind: Kind, seconds: float, threads: int = 1) -> float:
    return sum(lane.seconds[kind] for lane in lanes.values()) / max(1e-9, len(lanes) * seconds * threads)


def _causes(record: Record, f: Figures, lanes: Mapping[str, Lane], now: float) -> Iterator[str]:
    """Yield what else took the workers' time, and whether links are slower than planned, by its share."""
    cluster, end = record.plan.cluster, record.end(now)
    for name, lane in lanes.items():
        asleep = lane.asleep(record.submitted, end)
        if asleep > SHARE * f.seconds and lane.silent_since is None:
            yield f"{record.named(name)} was silent for {units.duration(asleep)}"
    titles = ", ".join(sorted(record.others, key=record.others.__getitem__, reverse=True)[:2])
    words = {kind: (f"{theme.ACTIVITIES[kind][0]} take", "of the workers' time") for kind in TASKS}
    words["other"] = "other work on the same workers takes", f"of their time: {titles}"
    found = [(_share(lanes, kind, f.seconds, cluster.threads), *said) for kind, said in words.items()]
    received, receiving = (sum(getattr(lane, of) for lane in lanes.values()) for of in ("received", "receiving"))
    if receiving and received / receiving * MISSED < cluster.link:
        rate, link = units.scaled(received / receiving, "B/s"), units.scaled(cluster.link, "B/s")
        what = f"links carry {rate}, {link} were planned: transfers take"
        found.append((receiving / max(1e-9, len(lanes) * f.seconds), what, "of the time"))
    for share, before, after in sorted(found, reverse=True):
        if share > SHARE:
            yield f"{before} {share:.0%} {after}"

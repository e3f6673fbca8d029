"""Reasons why a product is slower than its plan, as sentences that name workers and figures. Pure."""

from __future__ import annotations

import statistics

from distmm.telemetry.record import UNDER_WAY, Record

__all__ = ["reasons"]

# `reasons` reports a worker below this fraction of the median worker's rate, workers that compute for less than this
# fraction of the time, and rates below this fraction of the kernel's rate in the plan.
SLOW_WORKER, BUSY, PLANNED = 0.75, 0.7, 0.7

# `reasons` reports repeated steps above this fraction of all steps.
REPEATED = 0.05


def reasons(record: Record, now: float) -> list[str]:
    """Return why a product runs, or ran, below the rate of its plan; empty if it runs as planned."""
    f, lanes = record.figures(now), {name: lane for name, lane in record.lanes.items() if lane.steps}
    found = []
    if f.state in UNDER_WAY and f.workers < f.planned:
        found.append(f"{f.workers} of {f.planned} workers are heard of")
    if not lanes or not f.seconds:
        return found
    rates = {name: lane.busy_rate for name, lane in lanes.items()}
    median, slowest = statistics.median(rates.values()), min(rates, key=rates.__getitem__)
    if rates[slowest] < SLOW_WORKER * median:
        found.append(f"worker {slowest} computes at {rates[slowest] / median:.0%} of the median worker's rate")
    planned = record.plan.cluster.rate
    if median < PLANNED * planned:
        found.append(f"while they compute, workers reach {median / planned:.0%} of the kernel's rate in the plan")
    idlest = min(lanes, key=lambda name: lanes[name].seconds)
    workers = len(lanes) * f.seconds
    busy, reading, writing = (
        sum(getattr(lane, part) for lane in lanes.values()) / workers for part in ("seconds", "reading", "writing")
    )
    if busy < BUSY:
        found.append(
            f"workers compute for {busy:.0%} of the time ({idlest} for {lanes[idlest].seconds / f.seconds:.0%}); reads "
            f"take {reading:.0%} of it, checks and writes {writing:.0%}"
        )
    if f.again > REPEATED * f.total:
        found.append(f"{f.again} of {f.total} steps were lost and computed again")
    if f.refuted or record.refutations:
        found.append(f"checks that failed: {record.refutations}; such blocks are computed again")
    return found

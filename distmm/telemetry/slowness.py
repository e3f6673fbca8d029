"""Reasons why a product is slower than its plan, as sentences that name workers and figures. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from distmm import units

if TYPE_CHECKING:
    from distmm.telemetry.activity import Kind, Lane
    from distmm.telemetry.figures import Figures
    from distmm.telemetry.record import Record

# A product is slow if its time, or its workers' rate, misses the plan by this factor. So are links.
MISSED = 1.2

# Seconds by which a product has to be late. Small products take longer than planned, because tasks have to be sent.
LATE_SECONDS = 1.0

# A worker is slow below this fraction of the median worker's rate.
SLOW_WORKER = 0.75

# Least fraction of the workers' time, and of all steps, that is worth a sentence.
SHARE, REPEATED = 0.1, 0.05

TASKS: Mapping[Kind, tuple[str, str]] = {
    "operands": ("the operands' own tasks take", "of the workers' time"),
    "load": ("reads of A and B take", "of the workers' time"),
    "write": ("checks and writes of C take", "of the workers' time"),
}


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
    planned = record.plan.cost.seconds * _to_do(record)
    expected = f.seconds + (f.left if math.isfinite(f.left) else 0.0)
    late = expected > max(MISSED * planned, planned + LATE_SECONDS)
    weak = f.seconds > LATE_SECONDS and median * MISSED < record.plan.cluster.rate
    if late or weak:
        found += _causes(record, f, lanes, now)
    if weak:
        found.append(f"while they compute, workers reach {median / record.plan.cluster.rate:.0%} of the plan's rate")
    if late and not found:
        computing = _share(lanes, "multiply", f.seconds)
        found.append(
            f"it takes {units.duration(expected)}, {units.duration(planned)} were planned: workers compute for "
            f"{computing:.0%} of the time, and wait for most of the rest"
        )
    if record.refutations:
        found.append(f"checks that failed: {record.refutations}; such blocks are computed again")
    return found


def _to_do(record: Record) -> float:
    """Return the fraction of the product that was not on disk before."""
    return float(record.computed.sum() / max(1, (~record.mirrored).sum()))


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
    others = "other work on the same workers takes", f"of their time: {titles}"
    found = [
        (_share(lanes, kind, f.seconds, cluster.threads), *words) for kind, words in {**TASKS, "other": others}.items()
    ]
    received, receiving = (sum(getattr(lane, of) for lane in lanes.values()) for of in ("received", "receiving"))
    if receiving and received / receiving * MISSED < cluster.link:
        rate, link = units.scaled(received / receiving, "B/s"), units.scaled(cluster.link, "B/s")
        what = f"links carry {rate}, {link} were planned: transfers take"
        found.append((receiving / max(1e-9, len(lanes) * f.seconds), what, "of the time"))
    for share, before, after in sorted(found, reverse=True):
        if share > SHARE:
            yield f"{before} {share:.0%} {after}"

"""Figures of the dashboard by worker, as HTML: bars, and curves over time, drawn as in the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from markupsafe import Markup

from distmm import units
from distmm.telemetry import charts
from distmm.telemetry.activity import Lane
from distmm.telemetry.record import Record


class Quantity(NamedTuple):
    """What a bar chart shows: a bar and a mark for each worker, and one line. It takes lane, record and seconds."""

    title: str
    unit: str
    bar: Callable[[Lane, Record, float], float]
    mark: Callable[[Lane, Record, float], float]
    limit: Callable[[Record], float]


def _tasks(lane: Lane, record: Record, seconds: float) -> float:
    """Return the percentage of the time in which all threads run other tasks than steps."""
    others = sum(lane.seconds.values()) - lane.seconds["multiply"]
    return min(100.0, 100 * others / max(1e-9, seconds * record.plan.cluster.threads))


QUANTITIES = {
    "rate": Quantity(
        "Rate of workers since the start\nmark: while computing; line: plan",
        "FLOP/s",
        lambda lane, _, seconds: lane.flops / max(1e-9, seconds),
        lambda lane, *_: lane.busy_rate,
        lambda record: record.plan.cluster.rate,
    ),
    "memory": Quantity(
        "Most memory of blocks so far\nmark: GPU or process; line: plan",
        "B",
        lambda lane, *_: lane.peak_blocks,
        lambda lane, *_: lane.peak_process,
        lambda record: record.plan.peak.worker,
    ),
    "time": Quantity(
        "Time with a step running\nmark: all other tasks",
        "%",
        lambda lane, _, seconds: 100 * min(1.0, lane.seconds["multiply"] / max(1e-9, seconds)),
        _tasks,
        lambda _: 100.0,
    ),
    "transfers": Quantity(
        "Received from workers\nline: share of the 2-D bound",
        "B",
        lambda lane, *_: lane.received,
        lambda *_: math.nan,
        lambda record: record.plan.cost.bytes_bound / record.plan.grid.size,
    ),
}


def _by_worker(quantity: Quantity, record: Record, now: float) -> Markup:
    """Draw a bar and a mark for each worker, sorted by name; bars of silent workers are grey."""
    seconds, found = record.end(now) - record.submitted, []
    for name in sorted(record.lanes, key=units.natural):
        about = record.lanes[name], record, seconds
        found.append(charts.Bar(name, record.color(name), quantity.bar(*about), quantity.mark(*about)))
    return _titled(quantity.title, charts.bars(found, quantity.limit(record), quantity.unit))


def _over_time(
    quantity: Quantity, title: str, curves: Callable[[Record, float], list[charts.Curve]], record: Record, now: float
) -> Markup:
    """Draw a curve for each worker, or the highest, median and lowest of many workers."""
    shown = "highest, median, lowest" if len(record.lanes) > charts.MOST_CURVES else "each worker"
    seconds, limit = max(1e-3, record.end(now) - record.submitted), (quantity.limit(record), "")
    chart = charts.lines(seconds, curves(record, now), limit, quantity.unit, charts.PANE)
    return _titled(f"{title}\n{shown}; line: plan", chart)


def _titled(title: str, chart: Markup) -> Markup:
    return Markup("<div class=title>{}</div>{}").format(title, chart)


# The panes by name. Each is drawn from a record at a time.
PANES: dict[str, Callable[[Record, float], Markup]] = {
    "rate-over-time": partial(_over_time, QUANTITIES["rate"], "Rate over time", charts.rate),
    "memory-over-time": partial(_over_time, QUANTITIES["memory"], "Memory of blocks over time", charts.memory),
    **{name: partial(_by_worker, quantity) for name, quantity in QUANTITIES.items()},
}

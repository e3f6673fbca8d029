"""Figures of the dashboard by worker: bars, and curves over time. Each one shows the present state of a record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d, Span
from bokeh.plotting import figure

from distmm.telemetry import curves, theme, units
from distmm.telemetry.record import Record
from distmm.telemetry.worker_totals import Lane

__all__ = ["QUANTITIES", "TIME_QUANTITIES", "Bars", "Curves", "Pane"]

# Letters that fit below the bars of a pane of 300 pixels.
LETTERS = 30

# Most labels of a time axis: a pane of JupyterLab is 300 pixels wide.
LABELS = 5

# Seconds between two updates of the curves. An update for 256 workers takes 10 ms on the scheduler.
CURVE_SECONDS = 2.0


class Pane:
    """A figure (`root`) that shows one record."""

    root: Any

    def update(self, record: Record | None, now: float) -> None:
        """Show `record` at the time `now` (seconds since the epoch); None clears the figure."""
        raise NotImplementedError


def framed(title: str, note: str, **options: Any) -> Any:
    """Return a figure without tools; `note` is a second line below its title."""
    root = figure(title=title, y_range=Range1d(0, 1), tools="", toolbar_location=None, **options)
    root.title.update(text=f"{title}\n{note}" if note else title, text_font_size="12px")
    return root


@dataclass(frozen=True)
class Quantity:
    """What a bar chart shows: a bar and a mark for each worker, and one line; `over`: title of an ended product."""

    title: str
    over: str
    note: str
    unit: str
    bar: Callable[[Lane, Record, float], float]
    mark: Callable[[Lane, Record, float], float]
    limit: Callable[[Record], float]


def _memory(lane: Lane, record: Record, _: float) -> float:
    if record.over:
        return lane.peak_blocks
    return lane.samples[-1][1] if lane.samples and lane.left is None else 0


def _part(seconds: float, record: Record, now: float) -> float:
    """Return `seconds` as a percentage of the time that the product has run."""
    since = 0.0 if record.started is None else record.end(now) - record.started
    return 100 * min(1.0, seconds / since) if since > 0 else 0.0


QUANTITIES = {
    "rate": Quantity(
        "Rate of workers now",
        "Rate of workers at the end",
        "mark: while computing; line: plan",
        "FLOP/s",
        lambda lane, record, now: lane.rate(record.end(now)),
        lambda lane, *_: lane.busy_rate,
        lambda record: record.plan.cluster.rate,
    ),
    "memory": Quantity(
        "Memory of blocks now",
        "Memory of blocks at its peak",
        "mark: GPU or process; line: plan",
        "B",
        _memory,
        lambda lane, *_: lane.samples[-1][2] if lane.samples and lane.left is None else 0,
        lambda record: record.plan.cost.peak_bytes,
    ),
    "transfers": Quantity(
        "Received from workers",
        "Received from workers",
        "line: share of the 2-D bound",
        "B",
        lambda lane, *_: lane.received,
        lambda *_: math.nan,
        lambda record: record.plan.cost.bytes_bound / record.plan.grid.size,
    ),
    "time": Quantity(
        "Time with a step running",
        "Time with a step running",
        "mark: reads, checks and writes",
        "%",
        lambda lane, record, now: _part(lane.seconds, record, now),
        lambda lane, record, now: _part(lane.reading + lane.writing, record, now),
        lambda _: 100.0,
    ),
}


class Bars(Pane):
    """A bar chart of one quantity with a bar for each worker, sorted by name."""

    def __init__(self, quantity: str, **sizing: Any) -> None:
        self.quantity = QUANTITIES[quantity]
        columns = ("x", "bar", "mark", "size", "color", "name", "text")
        self.source = ColumnDataSource({column: [] for column in columns})
        self.names: list[str] = []
        self.root = framed(self.quantity.title, self.quantity.note, x_range=Range1d(0, 1), **sizing)
        self.root.xgrid.visible = False
        bars = self.root.vbar(x="x", top="bar", width=0.8, source=self.source, color="color")
        self.root.scatter(
            x="x", y="mark", marker="dash", size="size", line_width=3, source=self.source,
            line_color=theme.LIGHT["muted"], tags=["ink"],
        )  # fmt: skip
        self.limit = Span(dimension="width", line_color=theme.LIMIT, line_width=2, line_dash="dashed")
        self.root.add_layout(self.limit)
        self.root.add_tools(HoverTool(renderers=[bars], tooltips=[("worker", "@name"), ("", "@text")]))

    def update(self, record: Record | None, now: float) -> None:
        """Redraw the bars, in the decimal unit that fits the largest one."""
        q = self.quantity
        if record is None:
            self.source.data = {column: [] for column in self.source.data}
            return
        lanes = {name: record.lanes[name] for name in sorted(record.lanes, key=units.natural)}
        bar = np.array([float(q.bar(lane, record, now)) for lane in lanes.values()])
        mark = np.array([float(q.mark(lane, record, now)) for lane in lanes.values()])
        limit = float(q.limit(record))
        top = max(bar.max(initial=0.0), np.nan_to_num(mark).max(initial=0.0), limit, 1.0)
        scale, prefix = units.prefix(top)
        self.source.data = {
            "x": np.arange(len(lanes)) + 0.5,
            "bar": bar / scale,
            "mark": mark / scale,
            "size": np.full(len(lanes), min(14.0, max(3.0, 400 / max(1, len(lanes))))),
            "color": [record.color(name) for name in lanes],
            "name": list(lanes),
            "text": [units.scaled(value, q.unit) for value in bar],
        }
        self.limit.location = limit / scale
        self.root.y_range.end = 1.08 * top / scale
        self.root.yaxis.axis_label = prefix + q.unit
        self.root.title.text = f"{q.over if record.over else q.title}\n{q.note}"
        if list(lanes) != self.names:
            self._label(list(lanes))

    def _label(self, names: list[str]) -> None:
        """Label every bar if there is room, otherwise every n-th one."""
        self.names, count = names, len(names)
        self.root.x_range.end = max(1, count)
        longest = max((len(name) for name in names), default=0)
        stride = max(1, math.ceil(count * (longest + 1) / LETTERS))
        self.root.xaxis.ticker = FixedTicker(ticks=[x + 0.5 for x in range(0, count, stride)])
        self.root.xaxis.major_label_overrides = {x + 0.5: names[x] for x in range(0, count, stride)}


@dataclass(frozen=True)
class TimeQuantity:
    """What curves show over time, and their reference line."""

    title: str
    unit: str
    curves: Callable[[Record, float], list[curves.Curve]]
    limit: Callable[[Record], float]


TIME_QUANTITIES = {
    "rate over time": TimeQuantity("Rate over time", "FLOP/s", curves.rate, QUANTITIES["rate"].limit),
    "memory over time": TimeQuantity("Memory of blocks over time", "B", curves.memory, QUANTITIES["memory"].limit),
}


class Curves(Pane):
    """One quantity over time: a curve for each worker, or the highest, median and lowest of many workers."""

    def __init__(self, quantity: str, **sizing: Any) -> None:
        self.quantity = TIME_QUANTITIES[quantity]
        self.source = ColumnDataSource({column: [] for column in ("x", "y", "color", "name")})
        self.drawn: tuple[object, float] = (None, -math.inf)
        self.root = framed(self.quantity.title, " ", x_range=Range1d(0, 1), **sizing)
        lines = self.root.multi_line(xs="x", ys="y", source=self.source, line_color="color", line_width=1.8)
        self.limit = Span(dimension="width", line_color=theme.LIMIT, line_width=2, line_dash="dashed")
        self.root.add_layout(self.limit)
        self.root.add_tools(HoverTool(renderers=[lines], tooltips=[("", "@name")]))

    def update(self, record: Record | None, now: float) -> None:
        """Redraw the curves every `CURVE_SECONDS`; the curves of an ended product do not change."""
        state = None if record is None else (record.product, record.submitted, record.over and record.end(now))
        if state == self.drawn[0] and (state is None or now - self.drawn[1] < CURVE_SECONDS):
            return
        self.drawn = (state, now)
        found = self.quantity.curves(record, now) if record else []
        limit = self.quantity.limit(record) if record else 0.0
        top = max([limit, 1.0, *(float(curve.values.max(initial=0.0)) for curve in found)])
        scale, prefix = units.prefix(top)
        end = max(1e-3, record.end(now) - record.submitted) if record else 1.0
        self.source.data = {
            "x": [curve.times for curve in found],
            "y": [curve.values / scale for curve in found],
            "color": [curve.color for curve in found],
            "name": [curve.name for curve in found],
        }
        many = record is not None and len(record.lanes) > curves.MOST_CURVES
        shown = "highest, median, lowest" if many else "each worker"
        self.root.title.text = f"{self.quantity.title}\n{shown}; line: plan"
        self.limit.location = limit / scale
        self.root.y_range.end = 1.08 * top / scale
        self.root.yaxis.axis_label = prefix + self.quantity.unit
        self.root.x_range.end = end
        ticks = units.ticks(end, LABELS)
        self.root.xaxis.ticker = FixedTicker(ticks=list(ticks))
        self.root.xaxis.major_label_overrides = ticks

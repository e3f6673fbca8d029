"""Figures of the dashboard by worker: bars, and curves over time. Each one shows the present state of a record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d, Span
from bokeh.plotting import figure

from distmm import units
from distmm.telemetry import charts, theme
from distmm.telemetry.activity import Lane
from distmm.telemetry.record import Record

# Letters that fit below the bars of a pane of 300 pixels.
LETTERS = 30

# Seconds between two updates of the curves. An update for 256 workers takes 10 ms on the scheduler.
CURVE_SECONDS = 2.0


@dataclass(frozen=True)
class Quantity:
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
    "transfers": Quantity(
        "Received from workers\nline: share of the 2-D bound",
        "B",
        lambda lane, *_: lane.received,
        lambda *_: math.nan,
        lambda record: record.plan.cost.bytes_bound / record.plan.grid.size,
    ),
    "time": Quantity(
        "Time with a step running\nmark: all other tasks",
        "%",
        lambda lane, _, seconds: 100 * min(1.0, lane.seconds["multiply"] / max(1e-9, seconds)),
        _tasks,
        lambda _: 100.0,
    ),
}


class Drawing:
    """A figure (`root`) with a dashed line for the plan. Its axis has the decimal unit that fits its largest value."""

    def __init__(self, title: str, unit: str, columns: tuple[str, ...], **sizing: Any) -> None:
        self.unit = unit
        self.source = ColumnDataSource({column: [] for column in columns})
        self.root = figure(
            title=title, x_range=Range1d(0, 1), y_range=Range1d(0, 1), tools="", toolbar_location=None, **sizing
        )
        self.root.title.text_font_size = "12px"
        self.limit = Span(dimension="width", line_color=theme.LIMIT, line_width=2, line_dash="dashed")
        self.root.add_layout(self.limit)

    def scale(self, limit: float, *values: np.ndarray) -> float:
        """Fit the axis to the values; return what the unit of its labels is a multiple of."""
        top = max([limit, 1.0, *(float(np.nan_to_num(each).max(initial=0.0)) for each in values)])
        scale, prefix = units.prefix(top)
        self.limit.location = limit / scale
        self.root.y_range.end = 1.08 * top / scale
        self.root.yaxis.axis_label = prefix + self.unit
        return scale

    def label(self, labels: Mapping[float, str]) -> None:
        """Write labels along x, at their places."""
        self.root.xaxis.ticker = FixedTicker(ticks=list(labels))
        self.root.xaxis.major_label_overrides = dict(labels)


class Bars(Drawing):
    """A bar chart of one quantity with a bar for each worker, sorted by name; those of silent workers are grey."""

    def __init__(self, quantity: str, **sizing: Any) -> None:
        self.quantity = QUANTITIES[quantity]
        columns = ("x", "bar", "mark", "size", "color", "name", "text")
        super().__init__(self.quantity.title, self.quantity.unit, columns, **sizing)
        self.names: list[str] = []
        self.root.xgrid.visible = False
        bars = self.root.vbar(x="x", top="bar", width=0.8, source=self.source, color="color")
        self.root.scatter(
            x="x", y="mark", marker="dash", size="size", line_width=3, source=self.source,
            line_color=theme.LIGHT["muted"], tags=["ink"],
        )  # fmt: skip
        self.root.add_tools(HoverTool(renderers=[bars], tooltips=[("worker", "@name"), ("", "@text")]))

    def update(self, record: Record, now: float) -> None:
        """Redraw the bars."""
        q, seconds = self.quantity, record.end(now) - record.submitted
        lanes = {name: record.lanes[name] for name in sorted(record.lanes, key=units.natural)}
        bar, mark = (np.array([float(of(lane, record, seconds)) for lane in lanes.values()]) for of in (q.bar, q.mark))
        scale = self.scale(float(q.limit(record)), bar, mark)
        self.source.data = {
            "x": np.arange(len(lanes)) + 0.5,
            "bar": bar / scale,
            "mark": mark / scale,
            "size": np.full(len(lanes), min(14.0, max(3.0, 400 / max(1, len(lanes))))),
            "color": [record.color(name) for name in lanes],
            "name": list(lanes),
            "text": [units.scaled(value, q.unit) for value in bar],
        }
        if list(lanes) != self.names:
            self.names, count = list(lanes), len(lanes)
            self.root.x_range.end = max(1, count)
            longest = max(map(len, lanes), default=0)
            stride = max(1, math.ceil(count * (longest + 1) / LETTERS))  # label every n-th bar if there are many
            self.label({x + 0.5: self.names[x] for x in range(0, count, stride)})


class Curves(Drawing):
    """One quantity over time: a curve for each worker, or the highest, median and lowest of many workers."""

    def __init__(
        self, quantity: str, title: str, curves: Callable[[Record, float], list[charts.Curve]], **sizing: Any
    ) -> None:
        self.quantity, self.title, self.curves = QUANTITIES[quantity], title, curves
        super().__init__(f"{self.title}\n ", self.quantity.unit, ("x", "y", "color", "name"), **sizing)
        self.drawn: tuple[object, float] = (None, -math.inf)
        lines = self.root.multi_line(xs="x", ys="y", source=self.source, line_color="color", line_width=1.8)
        self.root.add_tools(HoverTool(renderers=[lines], tooltips=[("", "@name")]))

    def update(self, record: Record, now: float) -> None:
        """Redraw the curves every `CURVE_SECONDS`; the curves of an ended product do not change."""
        state = record.product, record.submitted, record.over and record.end(now)
        if state == self.drawn[0] and now - self.drawn[1] < CURVE_SECONDS:
            return
        self.drawn = (state, now)
        found = self.curves(record, now)
        scale = self.scale(float(self.quantity.limit(record)), *(curve.values for curve in found))
        self.source.data = {
            "x": [curve.times for curve in found],
            "y": [curve.values / scale for curve in found],
            "color": [curve.color for curve in found],
            "name": [curve.name for curve in found],
        }
        shown = "highest, median, lowest" if len(record.lanes) > charts.MOST_CURVES else "each worker"
        self.root.title.text = f"{self.title}\n{shown}; line: plan"
        self.root.x_range.end = end = max(1e-3, record.end(now) - record.submitted)
        unit, name = units.time_unit(end)
        self.label({at * unit: f"{at:.6g} {name}" for at in units.ticks(end / unit)})

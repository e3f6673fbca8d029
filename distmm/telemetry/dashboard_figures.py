"""Figures of the dashboard: the grid of C, and bars by worker. Each takes a record and shows it as it is now."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d, Span
from bokeh.plotting import figure

from distmm.telemetry import theme, units
from distmm.telemetry.record import Record
from distmm.telemetry.worker_totals import Lane

__all__ = ["QUANTITIES", "Bars", "Blocks", "Pane", "Quantity"]

# Most cells of the grid of C; a larger grid is drawn with several blocks a cell. 64 x 64 cells are about 8 pixels wide
# on a laptop, and 40 kB an update.
MOST_CELLS = 4096

# Most cells that carry their owner's name, and most bars that carry their worker's.
NAMED_CELLS, NAMED_WORKERS = 64, 24

# Opacity of a block of which nothing is done.
EMPTY = 0.1


class Pane:
    """A figure (`root`) that shows one record."""

    root: Any

    def update(self, record: Record | None, now: float) -> None:
        """Show `record` as it is at the time `now`; nothing without one."""
        raise NotImplementedError


class Blocks(Pane):
    """The grid of C: a cell's colour is its owner, its opacity the part of its steps that is done."""

    def __init__(self, **sizing: Any) -> None:
        columns = ("x", "y", "fill", "alpha", "edge", "width", "name", "text", "owner", "done", "state")
        self.source = ColumnDataSource({column: [] for column in columns})
        self.shape: tuple[object, ...] = ()
        self.root = figure(
            title="Blocks of C: owner (colour), part done (opacity)",
            x_range=Range1d(0, 1), y_range=Range1d(1, 0), tools="", toolbar_location=None,
            x_axis_location="above", **sizing,
        )  # fmt: skip
        self.root.grid.visible = False
        self.root.rect(
            x="x", y="y", width=0.92, height=0.92, source=self.source,
            fill_color="fill", fill_alpha="alpha", line_color="edge", line_width="width",
        )  # fmt: skip
        self.root.text(
            x="x", y="y", text="text", source=self.source, text_align="center", text_baseline="middle",
            text_font_size="11px", text_color=theme.LIGHT["ink"],
        )  # fmt: skip
        self.root.add_tools(
            HoverTool(tooltips=[("block", "@name"), ("owner", "@owner"), ("done", "@done{0 %}"), ("", "@state")])
        )

    def update(self, record: Record | None, now: float) -> None:
        """Redraw the cells."""
        if record is None:
            self.source.data = {column: [] for column in self.source.data}
            return
        rows = record.chains // record.columns  # of all matrices of a batch, one below the other
        side = math.ceil(math.sqrt(max(1, record.chains / MOST_CELLS)))
        high, wide = math.ceil(rows / side), math.ceil(record.columns / side)
        row, column = np.divmod(np.arange(record.chains), record.columns)
        cell = row // side * wide + column // side
        members = np.bincount(cell)
        first = np.unique(cell, return_index=True)[1]
        names = list(record.lanes)
        colors = dict(zip(names, theme.owner_colors(len(names)), strict=True))
        owners = [record.owners[chain] for chain in first]
        done = np.bincount(cell, weights=record.progress) / members
        again, refuted, resumed = (
            np.bincount(cell, weights=flags) > 0 for flags in (record.again, record.refuted, record.resumed)
        )
        edge = np.where(refuted, theme.WRONG, np.where(again, theme.AGAIN, theme.LIGHT["muted"]))
        more = "" if side == 1 else f" and the {side} x {side} blocks from there"
        states = zip(refuted, again, resumed, strict=True)
        self.source.data = {
            "x": np.arange(len(first)) % wide + 0.5,
            "y": np.arange(len(first)) // wide + 0.5,
            "fill": [colors.get(owner, theme.LIGHT["muted"]) for owner in owners],
            "alpha": EMPTY + (1 - EMPTY) * done,
            "edge": edge,
            "width": np.where(refuted | again, 3.0, 0.4),
            "name": [record.block(chain) + more for chain in first],
            "text": owners if record.chains <= NAMED_CELLS else [""] * len(first),
            "owner": owners,
            "done": done,
            "state": [_state(*flags) for flags in states],
        }
        if self.shape != (high, wide):
            self.shape = (high, wide)
            self.root.x_range.update(start=0, end=wide)
            self.root.y_range.update(start=high, end=0)
            for axis, count in ((self.root.xaxis, wide), (self.root.yaxis, high)):
                at = sorted({0, count // 2, count - 1} if count > 8 else range(count))
                axis.ticker = FixedTicker(ticks=[x + 0.5 for x in at])
                axis.major_label_overrides = {x + 0.5: str(x * side) for x in at}


def _state(refuted: bool, again: bool, resumed: bool) -> str:
    words = [("failed its check", refuted), ("computed again", again), ("from disk", resumed)]
    return ", ".join(word for word, holds in words if holds)


@dataclass(frozen=True)
class Quantity:
    """What bars show: a bar and a mark for each worker, and one line for all."""

    title: str
    unit: str
    bar: Callable[[Lane, float], float]
    mark: Callable[[Lane, float], float]
    limit: Callable[[Record], float]


QUANTITIES = {
    "rate": Quantity(
        "Rate now; mark: while busy; line: the kernel in the plan",
        "FLOP/s",
        lambda lane, now: lane.rate(now),
        lambda lane, _: lane.busy_rate,
        lambda record: record.plan.cluster.rate,
    ),
    "memory": Quantity(
        "Memory of blocks; mark: GPU or process; line: plan",
        "B",
        lambda lane, _: lane.samples[-1][1] if lane.samples and lane.left is None else 0,
        lambda lane, _: lane.samples[-1][2] if lane.samples and lane.left is None else 0,
        lambda record: record.plan.cost.peak_bytes,
    ),
    "transfers": Quantity(
        "Received from workers; line: share of the 2-D bound",
        "B",
        lambda lane, _: lane.received,
        lambda *_: math.nan,
        lambda record: record.plan.cost.bytes_bound / record.plan.grid.size,
    ),
}


class Bars(Pane):
    """One quantity, a bar a worker, in the order of their names."""

    def __init__(self, quantity: str, **sizing: Any) -> None:
        self.quantity = QUANTITIES[quantity]
        self.source = ColumnDataSource({"x": [], "bar": [], "mark": [], "size": [], "name": [], "text": []})
        self.names: list[str] = []
        self.root = figure(
            title=self.quantity.title, x_range=Range1d(0, 1), y_range=Range1d(0, 1), tools="", toolbar_location=None,
            **sizing,
        )  # fmt: skip
        self.root.xgrid.visible = False
        bars = self.root.vbar(x="x", top="bar", width=0.8, source=self.source, color=theme.DATA)
        self.root.scatter(
            x="x", y="mark", marker="dash", size="size", line_width=3, source=self.source, color=theme.MARK
        )  # fmt: skip
        self.limit = Span(dimension="width", line_color=theme.LIMIT, line_width=2, line_dash="dashed")
        self.root.add_layout(self.limit)
        self.root.add_tools(HoverTool(renderers=[bars], tooltips=[("worker", "@name"), ("", "@text")]))

    def update(self, record: Record | None, now: float) -> None:
        """Redraw the bars, in the decimal unit that fits the largest."""
        q = self.quantity
        lanes = {name: record.lanes[name] for name in sorted(record.lanes, key=units.natural)} if record else {}
        bar = np.array([q.bar(lane, now) for lane in lanes.values()], dtype=float)
        mark = np.array([q.mark(lane, now) for lane in lanes.values()], dtype=float)
        limit = float(q.limit(record)) if record else 0.0
        top = max(bar.max(initial=0.0), np.nan_to_num(mark).max(initial=0.0), limit, 1.0)
        scale, prefix = units.prefix(top)
        self.source.data = {
            "x": np.arange(len(lanes)) + 0.5,
            "bar": bar / scale,
            "mark": mark / scale,
            "size": np.full(len(lanes), min(14.0, max(3.0, 400 / max(1, len(lanes))))),
            "name": list(lanes),
            "text": [units.scaled(value, q.unit) for value in bar],
        }
        self.limit.location = limit / scale
        self.root.y_range.end = 1.08 * top / scale
        self.root.yaxis.axis_label = prefix + q.unit
        if list(lanes) != self.names:
            self._label(list(lanes))

    def _label(self, names: list[str]) -> None:
        """Name the bars while there is room, otherwise only some of them."""
        self.names, count = names, len(names)
        self.root.x_range.end = max(1, count)
        stride = max(1, math.ceil(count / NAMED_WORKERS))
        self.root.xaxis.ticker = FixedTicker(ticks=[x + 0.5 for x in range(0, count, stride)])
        self.root.xaxis.major_label_overrides = {x + 0.5: names[x] for x in range(0, count, stride)}
        long = max((len(name) for name in names), default=0) * min(count, NAMED_WORKERS) > 60
        self.root.xaxis.major_label_orientation = 0.8 if long else "horizontal"

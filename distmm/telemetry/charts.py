"""Charts of the page and of the report: SVG elements in the page's own colours and font.

`pages/chart.html` is the template of a chart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from distmm import templates, units
from distmm.telemetry import theme
from distmm.telemetry.activity import Kind
from distmm.telemetry.record import Record

# Room above the vertical axis, and right of the horizontal one, in units of the SVG.
TOP, END = 18, 26

# Largest and smallest height of a worker's lane, and the height that all lanes share: 256 lanes fit on one screen.
LANE, THIN_LANE, ALL_LANES = 22.0, 3.0, 900.0

# The part of the vertical axis that the largest value reaches.
FULL = 0.95

# Letters that fit below the bars of a pane.
LETTERS = 30

# Intervals closer than half a pixel are drawn as one. This bounds the size of the file.
PIXEL = 0.5

# Up to this many workers get a curve each. Of more workers, the highest, the median and the lowest value are drawn.
MOST_CURVES = 16

# Points of a curve.
POINTS = 120

# The curves for many workers: name, quantile over the workers at each time, colour.
QUANTILES = (("highest", 1.0, theme.MARK), ("median", 0.5, theme.DATA), ("lowest", 0.0, theme.MARK))

Interval = tuple[float, float]


class Size(NamedTuple):
    """Size of a chart in units of the SVG: its width, the room left of its vertical axis, and the length of that."""

    width: float
    left: float
    height: float

    def x(self, part: Any) -> Any:
        """Return the place of a part of the horizontal axis."""
        return self.left + (self.width - END - self.left) * part

    def y(self, part: Any) -> Any:
        """Return the place of a part of the largest value on the vertical axis."""
        return TOP + self.height * (1 - FULL * part)


# A unit is a pixel where the report has its full width. A pane of the page is about as wide as its charts.
REPORT, PANE = Size(1000, 110, 220), Size(360, 84, 112)


class Mark(NamedTuple):
    """A line of a chart, as an SVG path, with its tooltip."""

    tooltip: str
    color: str
    width: float
    path: str


class Curve(NamedTuple):
    """A quantity over time; `times` are seconds since the product was submitted."""

    name: str
    color: str
    times: np.ndarray
    values: np.ndarray


class Bar(NamedTuple):
    """A quantity of a worker, and another one that is marked on its bar; NaN without a mark."""

    name: str
    color: str
    value: float
    mark: float


def timeline(record: Record, seconds: float) -> Markup:
    """Draw a lane for each worker with its activities and silences; `seconds` is the length of the time axis."""
    names = sorted(record.lanes, key=units.natural)
    height = min(LANE, max(THIN_LANE, ALL_LANES / max(1, len(names))))
    found: defaultdict[tuple[str, Kind], list[Interval]] = defaultdict(list)
    for each in (*record.activities, *record.transfers):
        found[each.worker, each.kind].append((each.start, each.stop))
    marks, middles = [], {}
    for at, name in enumerate(names):
        lane, top = record.lanes[name], TOP + at * height
        middles[top + height / 2] = name
        for row, (kind, (what, color)) in enumerate(theme.ACTIVITIES.items()):
            y, width = (0.27, 0.46) if row == 0 else (0.47 + 0.12 * row, 0.11)
            path = _intervals(record, seconds, found[name, kind], top + y * height)
            marks.append(Mark(f"{name}: {what or 'products'}", color or record.color(name), width * height, path))
        path = _intervals(record, seconds, lane.silences, top + height / 2)
        marks.append(Mark(f"{name}: silent", theme.NOBODY, 0.9 * height, path))
        if lane.lost is not None:
            x = REPORT.x(max(0.0, lane.lost - record.submitted) / seconds)
            marks.append(Mark(f"{name} was lost", theme.WRONG, 3, f"M{x:.1f} {top:.1f}v{height:.1f}"))
    labels, size = list(middles.items())[:: math.ceil(12 / height)], REPORT._replace(height=height * len(names))
    return _chart("Timeline of the workers", size, marks, _times(seconds, size), beside=dict(labels))


def lines(seconds: float, series: Sequence[Curve], limit: tuple[float, str], unit: str, size: Size = REPORT) -> Markup:
    """Draw quantities over time, and a dashed reference line."""
    top = max([limit[0], 1.0, *(float(curve.values.max(initial=0)) for curve in series)])
    marks = []
    for curve in series:
        points = zip(size.x(curve.times / seconds), size.y(curve.values / top), strict=True)
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        marks.append(Mark(curve.name, curve.color, 1.6, path and f"M{path}"))
    return _chart(f"Over time, in {unit}", size, marks, _times(seconds, size), values=(top, unit), limit=limit)


def bars(series: Sequence[Bar], limit: float, unit: str) -> Markup:
    """Draw a bar for each worker with its mark, and a dashed reference line, for a pane of the page."""
    top, count = max([limit, 1.0, *(np.nanmax((bar.value, bar.mark)) for bar in series)]), max(1, len(series))
    middles, wide = [PANE.x((at + 0.5) / count) for at in range(count)], 0.8 * (PANE.x(1) - PANE.x(0)) / count
    drawn, marks = [], ""
    for x, bar in zip(middles, series, strict=False):
        path = f"M{x:.1f} {PANE.y(0):.1f}V{PANE.y(bar.value / top):.1f}"
        drawn.append(Mark(f"{bar.name}: {units.scaled(bar.value, unit)}", bar.color, wide, path))
        if not math.isnan(bar.mark):
            marks += f"M{x - wide / 2:.1f} {PANE.y(bar.mark / top):.1f}h{wide:.1f}"
    drawn.append(Mark("", "var(--ink)", 3, marks))
    longest = max((len(bar.name) for bar in series), default=0)
    stride = math.ceil(count * (longest + 1) / LETTERS)  # label every n-th bar if there are many
    labels = {x: bar.name for x, bar in list(zip(middles, series, strict=False))[::stride]}
    return _chart(f"By worker, in {unit}", PANE, drawn, labels, values=(top, unit), limit=(limit, ""))


def merged(intervals: Iterable[Interval], gap: float) -> np.ndarray:
    """Return intervals as sorted rows ``(start, stop)``; intervals less than `gap` apart become one."""
    found = np.array(sorted(intervals), dtype=float).reshape(-1, 2)
    ends = np.maximum.accumulate(found[:, 1])
    first = np.flatnonzero(np.append(len(found) > 0, found[1:, 0] - ends[:-1] >= gap)[: len(found)])
    return np.column_stack([found[first, 0], ends[np.append(first[1:], len(found)) - 1] if len(found) else ends])


def _intervals(record: Record, seconds: float, intervals: Iterable[Interval], y: float) -> str:
    """Return the path of all intervals, as far as they are on the time axis: one path for each would be much longer."""
    inside = np.array(list(intervals), dtype=float).reshape(-1, 2) - record.submitted
    inside = inside[(inside[:, 0] < seconds) & (inside[:, 1] > 0)].clip(0, seconds)
    ends = merged(REPORT.x(inside / seconds).tolist(), PIXEL)
    return "".join(f"M{start:.1f} {y:.1f}H{max(stop, start + PIXEL):.1f}" for start, stop in ends)


def _times(seconds: float, size: Size) -> dict[float, str]:
    """Return the labels of an axis of times up to `seconds`, by their places."""
    unit, name = units.time_unit(seconds)
    ticks = units.ticks(seconds / unit, 10 if size.width == REPORT.width else 5)
    return {size.x(at * unit / seconds): f"{at:.6g} {name}" for at in ticks}


def _chart(
    label: str, size: Size, marks: Iterable[Mark], below: Mapping[float, str], *,
    values: tuple[float, str] | None = None, beside: Mapping[float, str] | None = None,
    limit: tuple[float, str] | None = None,
) -> Markup:  # fmt: skip
    """Return a chart with labels `below` it, and beside it an axis of `values`, or labels."""
    grid_y = {}
    if values is not None:
        top, of = values
        beside = grid_y = {size.y(at / top): units.scaled(at, of) for at in units.ticks(top / FULL)}
        limit = limit and (size.y(limit[0] / top), limit[1])
    return Markup(
        templates.filled(
            theme.PAGES / "chart.html", label=label, width=size.width, left=size.left, right=size.x(1), top=TOP,
            bottom=TOP + round(size.height), below=below, beside=beside or {}, grid_y=grid_y,
            marks=[mark for mark in marks if mark.path], limit=limit, theme=theme,
        )
    )  # fmt: skip


def rate(record: Record, now: float) -> list[Curve]:
    """Return the FLOP/s of each worker until `now`, or until the product ended."""
    edges = np.linspace(record.submitted, record.end(now), POINTS + 1)
    lengths = np.maximum(np.diff(edges), 1e-9)
    shown = slice(None if record.over else -1)  # the last interval lacks the tasks that run now
    rates = {name: (np.diff(lane.work.at(edges)) / lengths)[shown] for name, lane in record.lanes.items() if lane.steps}
    return _few(record, ((edges[:-1] + edges[1:]) / 2)[shown], rates)


def memory(record: Record, now: float) -> list[Curve]:
    """Return the bytes of blocks on each worker until `now`, or until the product ended."""
    times = np.linspace(record.submitted, record.end(now), POINTS)
    return _few(record, times, {name: lane.blocks.at(times) for name, lane in record.lanes.items()})


def _few(record: Record, times: np.ndarray, values: Mapping[str, np.ndarray]) -> list[Curve]:
    """Return a curve for each worker, or `QUANTILES` if there are more than `MOST_CURVES`."""
    times = times - record.submitted
    if len(values) <= MOST_CURVES:
        return [Curve(name, record.color(name), times, values[name]) for name in sorted(values, key=units.natural)]
    every = np.array(list(values.values()))
    return [Curve(name, color, times, np.quantile(every, part, axis=0)) for name, part, color in QUANTILES]

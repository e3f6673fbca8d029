"""Charts of a report, drawn by matplotlib: SVG elements in the page's own colours and font, with time along x.

The page embeds each chart. So the colours of `theme` for text and lines become CSS variables, and the parts that only a
separate SVG file needs are removed: header, metadata, names of elements, clipping.
"""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter, MaxNLocator

from distmm import units
from distmm.telemetry import theme
from distmm.telemetry.activity import Kind
from distmm.telemetry.curves import Curve
from distmm.telemetry.record import Record

# Width of all charts and of the margins, in points. A point is a pixel where the page has its full width.
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000, 110, 26, 18, 24

# Largest and smallest height of a worker's lane, and the height that all lanes share: 256 lanes fit on one screen.
LANE, THIN_LANE, ALL_LANES = 22.0, 3.0, 900.0

# Intervals closer than half a pixel are drawn as one. This bounds the size of the file.
PIXEL = 0.5

Interval = tuple[float, float]

# An artist whose id begins with this prefix gets the rest of the id as its tooltip.
TOOLTIP = "tooltip:"


def timeline(record: Record, seconds: float) -> str:
    """Draw a lane for each worker with its activities and silences; `seconds` is the length of the time axis."""
    names = sorted(record.lanes, key=units.natural)
    height = min(LANE, max(THIN_LANE, ALL_LANES / max(1, len(names))))
    figure, axes = _frame(height * len(names))
    _time_axis(axes, seconds)
    axes.set_ylim(max(1, len(names)), 0)
    shown = range(0, len(names), math.ceil(12 / height))
    axes.set_yticks([at + 0.5 for at in shown], [names[at] for at in shown], parse_math=False)
    axes.yaxis.grid(visible=False)
    gap = PIXEL / (WIDTH - LEFT - RIGHT) * axes.get_xlim()[1]
    found: defaultdict[tuple[str, Kind], list[Interval]] = defaultdict(list)
    for each in (*record.activities, *record.transfers):
        found[each.worker, each.kind].append((max(0.0, each.start - record.submitted), each.stop - record.submitted))
    for at, name in enumerate(names):
        lane, rows = record.lanes[name], enumerate(theme.ACTIVITIES.items())
        for row, (kind, (what, color)) in rows:
            if intervals := found[name, kind]:
                y, width = (at + 0.27, 0.46) if row == 0 else (at + 0.47 + 0.12 * row, 0.11)
                label = f"{name}: {what or 'products'}"
                _intervals(axes, merged(intervals, gap), y, width * height, color or record.color(name), label)
        silences = [
            (max(0.0, start - record.submitted), min(stop - record.submitted, seconds)) for start, stop in lane.silences
        ]
        if quiet := [(start, stop) for start, stop in silences if start < stop]:
            _intervals(axes, merged(quiet, gap), at + 0.5, 0.9 * height, theme.NOBODY, f"{name}: silent")
        if lane.lost is not None:
            lost = max(0.0, lane.lost - record.submitted)
            axes.plot([lost] * 2, [at, at + 1], color=theme.WRONG, linewidth=3, gid=f"{TOOLTIP}{name} was lost")
    return _svg(figure, "Timeline of the workers")


def lines(seconds: float, series: Sequence[Curve], limit: tuple[float, str], unit: str) -> str:
    """Draw quantities over time, and a dashed reference line."""
    figure, axes = _frame(220)
    _time_axis(axes, seconds)
    _value_axis(axes, max([limit[0], 1.0, *(float(curve.values.max(initial=0)) for curve in series)]), unit)
    for curve in series:
        axes.plot(curve.times, curve.values, color=curve.color, linewidth=1.6, gid=f"{TOOLTIP}{curve.name}")
    _limit(axes, *limit)
    return _svg(figure, f"Over time, in {unit}")


def bars(values: Sequence[tuple[str, str, float]], limit: tuple[float, str], unit: str) -> str:
    """Draw a bar for each worker, given as ``(name, colour, value)``, and a dashed reference line."""
    figure, axes = _frame(160)
    count = max(1, len(values))
    axes.set_xlim(-0.5, count - 0.5)
    _value_axis(axes, max([limit[0], 1.0, *(value for *_, value in values)]), unit)
    each = (WIDTH - LEFT - RIGHT) / count
    heights, colors = [value for *_, value in values], [color for _, color, _ in values]
    drawn = axes.bar(range(len(values)), heights, min(0.8, 60 / each), color=colors)
    for bar, (name, _, value) in zip(drawn, values, strict=True):
        bar.set_gid(f"{TOOLTIP}{name}: {units.scaled(value, unit)}")
    longest = max((len(name) for name, *_ in values), default=0)
    shown = range(0, len(values), math.ceil((7 * longest + 10) / each))
    axes.set_xticks(list(shown), [values[at][0] for at in shown], parse_math=False)
    axes.xaxis.grid(visible=False)
    _limit(axes, *limit)
    return _svg(figure, f"By worker, in {unit}")


def merged(intervals: Iterable[Interval], gap: float) -> np.ndarray:
    """Return intervals as sorted rows ``(start, stop)``; intervals less than `gap` apart become one."""
    found = np.array(sorted(intervals), dtype=float).reshape(-1, 2)
    ends = np.maximum.accumulate(found[:, 1])
    first = np.flatnonzero(np.append(len(found) > 0, found[1:, 0] - ends[:-1] >= gap)[: len(found)])
    return np.column_stack([found[first, 0], ends[np.append(first[1:], len(found)) - 1] if len(found) else ends])


def _intervals(axes: Axes, intervals: np.ndarray, y: float, width: float, color: str, tooltip: str) -> None:
    """Draw all intervals as one path: one path for each would make the file ten times as large."""
    least = PIXEL / (WIDTH - LEFT - RIGHT) * axes.get_xlim()[1]
    starts, stops = intervals[:, 0], np.maximum(intervals[:, 1], intervals[:, 0] + least)
    x = np.column_stack([starts, stops]).ravel()
    path = Path(np.column_stack([x, np.full(len(x), y)]), np.tile([Path.MOVETO, Path.LINETO], len(starts)))
    path.should_simplify = False
    axes.add_artist(
        PathPatch(path, fill=False, edgecolor=color, linewidth=width, capstyle="butt", gid=f"{TOOLTIP}{tooltip}")
    )


def _frame(height: float) -> tuple[Figure, Axes]:
    """Return a figure of width `WIDTH`, and its axes, which are `height` points high."""
    whole = height + TOP + BOTTOM
    figure = Figure(figsize=(WIDTH / 72, whole / 72), dpi=72)
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    axes = figure.add_axes((LEFT / WIDTH, BOTTOM / whole, (WIDTH - LEFT - RIGHT) / WIDTH, max(height, 1) / whole))
    axes.set_frame_on(False)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=8, labelsize=12, labelcolor=theme.LIGHT["muted"])
    axes.grid(color=theme.LIGHT["line"], linewidth=1)
    return figure, axes


def _time_axis(axes: Axes, seconds: float) -> None:
    axes.set_xlim(0, max(seconds, 1e-3))
    ticks = units.ticks(seconds)
    axes.set_xticks(list(ticks), list(ticks.values()))


def _value_axis(axes: Axes, top: float, unit: str) -> None:
    axes.set_ylim(0, 1.05 * top)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(EngFormatter(unit))


def _limit(axes: Axes, value: float, text: str) -> None:
    """Draw the dashed reference line and its label."""
    axes.axhline(value, color=theme.LIMIT, linewidth=1.5, linestyle=(0, (6, 4)))
    axes.annotate(
        text, (1, value), (-4, 4), ("axes fraction", "data"), "offset points", ha="right", size=12,
        color=theme.LIGHT["muted"],
    )  # fmt: skip


def _svg(figure: Figure, label: str) -> Markup:
    """Return a figure as an SVG element for the page."""
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # text stays text, in the page's font
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    width, height = figure.get_size_inches() * 72
    _, _, text = file.getvalue().partition("</defs>")
    text = re.sub(r"(?s)<defs>.*?</defs>|<g id=\"[^\"]*\"/>| clip-path=\"[^\"]*\"", "", text)
    text = re.sub(rf'<g id="{TOOLTIP}([^"]*)">', r"<g><title>\1</title>", text)
    text = re.sub(r"<g id=\"[^\"]*\">", "<g>", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = re.sub(r' d="([^"]*)"', _shortened, text)
    text = re.sub(r"\s*\n\s*", "", text)
    for name, color in theme.LIGHT.items():
        text = text.replace(color, f"var(--{name})")
    box, label = f"0 0 {width:.0f} {height:.0f}", escape(label, quote=True)
    return Markup(f'<svg viewBox="{box}" role="img" aria-label="{label}">{text}')


def _shortened(path: re.Match[str]) -> str:
    """Round a path to tenths of a pixel and drop spaces around its letters: this leaves a third of the text."""
    return ' d="' + re.sub(r"\s*([MLCQz])\s*", r"\1", re.sub(r"(\.\d)\d+", r"\1", path[1])).strip() + '"'

"""Charts of a report, drawn by matplotlib: SVG elements in the page's own colours and font, with time along x.

They stand inside the page. So the colours of `theme` for text and lines become CSS variables, and everything goes that
belongs to a file of its own: header, metadata, names of elements, clipping.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter, MaxNLocator

from distmm.telemetry import theme, units

__all__ = ["bars", "lines", "merged", "timeline"]

# Width of all charts and of the margins, in points, which are pixels where the page has its full width.
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000, 110, 10, 18, 24

# Height of a worker's lane: as much as lets 256 of them be seen at once, and no more than is pleasant.
LANE, THIN_LANE, ALL_LANES = 22.0, 3.0, 900.0

# Intervals closer than this are drawn as one: half of what a screen can show, which bounds the file's size.
PIXEL = 0.5

Interval = tuple[float, float]

# An artist with this at the beginning of its id gets the rest as its tooltip.
TOOLTIP = "tooltip:"


def timeline(seconds: float, lanes: Sequence[tuple[str, Iterable[Interval], Iterable[Interval], float | None]]) -> str:
    """Draw what each worker did when.

    Parameters
    ----------
    seconds : float
        Length of the time axis.
    lanes : sequence of (name, runs, transfers, left)
        Intervals in seconds; `left` is when the worker was lost, if it was.
    """
    height = min(LANE, max(THIN_LANE, ALL_LANES / max(1, len(lanes))))
    figure, axes = _frame(height * len(lanes))
    _time_axis(axes, seconds)
    axes.set_ylim(max(1, len(lanes)), 0)
    shown = range(0, len(lanes), math.ceil(12 / height))
    axes.set_yticks([at + 0.5 for at in shown], [lanes[at][0] for at in shown])
    axes.yaxis.grid(visible=False)
    gap = PIXEL / (WIDTH - LEFT - RIGHT) * axes.get_xlim()[1]
    for at, (name, runs, transfers, left) in enumerate(lanes):
        _intervals(axes, merged(runs, gap), at + 0.36, 0.6 * height, theme.DATA, f"{name}: products")
        _intervals(axes, merged(transfers, gap), at + 0.8, 0.2 * height, theme.MARK, f"{name}: transfers")
        if left is not None:
            axes.plot([left] * 2, [at, at + 1], color=theme.WRONG, linewidth=3, gid=f"{TOOLTIP}{name} was lost")
    return _svg(figure, "Timeline of the workers")


def lines(
    seconds: float, series: Sequence[tuple[str, np.ndarray, np.ndarray]], limit: tuple[float, str], unit: str
) -> str:
    """Draw quantities over time, ``(name, times, values)`` each, and the line that they are compared with."""
    figure, axes = _frame(220)
    _time_axis(axes, seconds)
    _value_axis(axes, max([limit[0], 1.0, *(float(values.max(initial=0)) for _, _, values in series)]), unit)
    opacity = max(0.25, 1 / math.sqrt(max(1, len(series))))
    for name, times, values in series:
        axes.plot(times, values, color=theme.DATA, linewidth=1.8, alpha=opacity, gid=f"{TOOLTIP}{name}")
    _limit(axes, *limit)
    return _svg(figure, f"Over time, in {unit}")


def bars(values: Sequence[tuple[str, float]], limit: tuple[float, str], unit: str) -> str:
    """Draw one bar a worker, and the line that they are compared with."""
    figure, axes = _frame(160)
    count = max(1, len(values))
    axes.set_xlim(-0.5, count - 0.5)
    _value_axis(axes, max([limit[0], 1.0, *(value for _, value in values)]), unit)
    each = (WIDTH - LEFT - RIGHT) / count
    drawn = axes.bar(range(len(values)), [value for _, value in values], min(0.8, 60 / each), color=theme.DATA)
    for bar, (name, value) in zip(drawn, values, strict=True):
        bar.set_gid(f"{TOOLTIP}{name}: {units.scaled(value, unit)}")
    longest = max((len(name) for name, _ in values), default=0)
    shown = range(0, len(values), math.ceil((7 * longest + 10) / each))
    axes.set_xticks(list(shown), [values[at][0] for at in shown])
    axes.xaxis.grid(visible=False)
    _limit(axes, *limit)
    return _svg(figure, f"By worker, in {unit}")


def merged(intervals: Iterable[Interval], gap: float) -> np.ndarray:
    """Return intervals in their order as rows, with those as one that are less than `gap` apart."""
    found = np.array(sorted(intervals), dtype=float).reshape(-1, 2)
    ends = np.maximum.accumulate(found[:, 1])
    first = np.flatnonzero(np.append(len(found) > 0, found[1:, 0] - ends[:-1] >= gap)[: len(found)])
    return np.column_stack([found[first, 0], ends[np.append(first[1:], len(found)) - 1] if len(found) else ends])


def _intervals(axes: Axes, intervals: np.ndarray, y: float, width: float, color: str, tooltip: str) -> None:
    """Draw intervals as one path: a path each would be ten times the text."""
    least = PIXEL / (WIDTH - LEFT - RIGHT) * axes.get_xlim()[1]
    starts, stops = intervals[:, 0], np.maximum(intervals[:, 1], intervals[:, 0] + least)
    x = np.column_stack([starts, stops]).ravel()
    path = Path(np.column_stack([x, np.full(len(x), y)]), np.tile([Path.MOVETO, Path.LINETO], len(starts)))
    path.should_simplify = False
    axes.add_artist(
        PathPatch(path, fill=False, edgecolor=color, linewidth=width, capstyle="butt", gid=f"{TOOLTIP}{tooltip}")
    )


def _frame(height: float) -> tuple[Figure, Axes]:
    """Return a figure of the usual width with one pair of axes of this height."""
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
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")


def _value_axis(axes: Axes, top: float, unit: str) -> None:
    axes.set_ylim(0, 1.05 * top)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(EngFormatter(unit))


def _limit(axes: Axes, value: float, text: str) -> None:
    """Draw the line that something is compared with."""
    axes.axhline(value, color=theme.LIMIT, linewidth=1.5, linestyle=(0, (6, 4)))
    axes.annotate(
        text, (1, value), (-4, 4), ("axes fraction", "data"), "offset points", ha="right", size=12,
        color=theme.LIGHT["muted"],
    )  # fmt: skip


def _svg(figure: Figure, label: str) -> str:
    """Return a figure as an element for the page."""
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
    return f'<svg viewBox="{box}" role="img" aria-label="{label}">{text}'


def _shortened(path: re.Match[str]) -> str:
    """Write a path with tenths of a pixel and without spaces around its letters: a third of the text."""
    return ' d="' + re.sub(r"\s*([MLCQz])\s*", r"\1", re.sub(r"(\.\d)\d+", r"\1", path[1])).strip() + '"'

"""Charts of a report as SVG text, drawn in the page's own colours (CSS variables), with time in seconds along x."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from distmm.telemetry import theme, units

__all__ = ["Chart", "bars", "lines", "timeline"]

# Width of all charts and of the space for labels at their left, in SVG units (pixels at full width).
WIDTH, LEFT, BOTTOM = 1000, 110, 24

# Height of a worker's lane: as much as lets 256 of them be seen at once, and no more than is pleasant.
LANE, THIN_LANE, ALL_LANES = 22, 3, 900

# Intervals closer than this are drawn as one: half of what a screen can show, which bounds the file's size.
PIXEL = 0.5


class Chart:
    """A frame with a time axis, into which others draw."""

    def __init__(self, seconds: float, height: float, label: str) -> None:
        self.seconds, self.height, self.label = max(seconds, 1e-3), height, label
        self.parts: list[str] = []
        step = _round_step(self.seconds)
        for tick in range(math.floor(self.seconds / step) + 1):
            x = self.x(tick * step)
            self.parts.append(f'<path class="grid" d="M{x:.1f} 0V{height:.1f}"/>')
            self.text(x, height + 16, f"{tick * step:g} s", "middle")

    def x(self, seconds: float) -> float:
        """Position of a time."""
        return LEFT + (WIDTH - LEFT - 10) * seconds / self.seconds

    def text(self, x: float, y: float, text: str, anchor: str = "end") -> None:
        """Write a label."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def path(self, d: str, color: str, width: float, title: str = "", extra: str = "") -> None:
        """Draw a path."""
        told = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(f'<path d="{d}" stroke="{color}" stroke-width="{width:g}" fill="none" {extra}>{told}</path>')

    def scale(self, top: float, unit: str) -> float:
        """Draw a vertical axis from 0 to `top`; return the height of one unit."""
        scale, prefix = units.prefix(top)
        for quarter in range(5):
            y = self.height * (1 - quarter / 4)
            self.parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - 10}"/>')
            self.text(LEFT - 8, y + 4, f"{top * quarter / 4 / scale:.3g} {prefix}{unit}")
        return self.height / top

    def limit(self, y: float, text: str) -> None:
        """Draw the line that something is compared with."""
        self.path(f"M{LEFT} {y:.1f}H{WIDTH - 10}", theme.LIMIT, 1.5, extra='stroke-dasharray="6 4"')
        self.text(WIDTH - 14, y - 4, text)

    def __str__(self) -> str:
        box = f"0 -14 {WIDTH} {self.height + BOTTOM + 14:.0f}"
        label = escape(self.label, quote=True)
        return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(self.parts)}</svg>'


def _round_step(extent: float) -> float:
    """Distance of ticks, 1, 2 or 5 times a power of ten, for five to ten of them."""
    power = 10.0 ** math.floor(math.log10(extent / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if extent / (power * factor) <= 10)


Interval = tuple[float, float]


def timeline(seconds: float, lanes: Sequence[tuple[str, Iterable[Interval], Iterable[Interval], float | None]]) -> str:
    """Draw what each worker did when.

    Parameters
    ----------
    seconds : float
        Length of the time axis.
    lanes : sequence of (name, runs, transfers, left)
        Intervals in seconds; `left` is when the worker was lost, if it was.
    """
    lane = min(LANE, max(THIN_LANE, ALL_LANES / max(1, len(lanes))))
    chart = Chart(seconds, lane * len(lanes), "Timeline of the workers")
    stride = math.ceil(12 / lane)
    for at, (name, runs, transfers, left) in enumerate(lanes):
        y = lane * at
        if at % stride == 0:
            chart.text(LEFT - 8, y + lane / 2 + 4, name)
        chart.path(_intervals(chart, runs, y + 0.36 * lane), theme.DATA, 0.6 * lane, f"{name}: products")
        chart.path(_intervals(chart, transfers, y + 0.8 * lane), theme.MARK, 0.2 * lane, f"{name}: transfers")
        if left is not None:
            chart.path(f"M{chart.x(left):.1f} {y:.1f}v{lane:.1f}", theme.WRONG, 3, f"{name} was lost")
    return str(chart)


def _intervals(chart: Chart, intervals: Iterable[Interval], y: float) -> str:
    """Intervals as one path; those that nearly touch are one."""
    merged: list[list[float]] = []
    for start, stop in sorted(intervals):
        left, right = chart.x(start), chart.x(stop)
        if merged and left - merged[-1][1] < PIXEL:
            merged[-1][1] = max(merged[-1][1], right)
        else:
            merged.append([left, right])
    return "".join(f"M{left:.1f} {y:.1f}h{max(PIXEL, right - left):.1f}" for left, right in merged)


def lines(
    seconds: float, series: Sequence[tuple[str, np.ndarray, np.ndarray]], limit: tuple[float, str], unit: str
) -> str:
    """Draw quantities over time, ``(name, times, values)`` each, and the line that they are compared with."""
    top = max([limit[0], 1.0, *(float(values.max(initial=0)) for _, _, values in series)]) * 1.05
    chart = Chart(seconds, 220, f"Over time, in {unit}")
    height = chart.scale(top, unit)
    for name, times, values in series:
        points = " ".join(
            f"{chart.x(t):.1f} {chart.height - height * v:.1f}" for t, v in zip(times, values, strict=True)
        )
        if points:
            opacity = max(0.25, 1 / math.sqrt(len(series)))
            chart.path(f"M{points}", theme.DATA, 1.8, name, f'stroke-opacity="{opacity:.2f}" stroke-linejoin="round"')
    chart.limit(chart.height - height * limit[0], limit[1])
    return str(chart)


def bars(values: Sequence[tuple[str, float]], limit: tuple[float, str], unit: str) -> str:
    """Draw one bar a worker, and the line that they are compared with."""
    top = max([limit[0], 1.0, *(value for _, value in values)]) * 1.05
    chart = Chart(1, 160, f"By worker, in {unit}")
    chart.parts.clear()  # no time axis
    height = chart.scale(top, unit)
    width = (WIDTH - LEFT - 10) / max(1, len(values))
    longest = max((len(name) for name, _ in values), default=0)
    stride = math.ceil((7 * longest + 10) / width)
    for at, (name, value) in enumerate(values):
        x = LEFT + width * (at + 0.5)
        told = f"{name}: {units.scaled(value, unit)}"
        chart.path(f"M{x:.1f} {chart.height}v{-height * value:.1f}", theme.DATA, min(0.8 * width, 60), told)
        if at % stride == 0:
            chart.text(x, chart.height + 16, name, "middle")
    chart.limit(chart.height - height * limit[0], limit[1])
    return str(chart)

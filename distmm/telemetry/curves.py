"""Rate and memory of the workers over time, as curves for page and report. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from distmm import units
from distmm.telemetry import theme
from distmm.telemetry.record import Record

# Up to this many workers get a curve each. Of more workers, the highest, the median and the lowest value are drawn.
MOST_CURVES = 16

# Points of a memory curve.
POINTS = 120

# The curves for many workers: name, quantile over the workers at each time, colour.
QUANTILES = (("highest", 1.0, theme.MARK), ("median", 0.5, theme.DATA), ("lowest", 0.0, theme.MARK))


class Curve(NamedTuple):
    """A quantity over time; `times` are seconds since the product was submitted."""

    name: str
    color: str
    times: np.ndarray
    values: np.ndarray


def rate(record: Record, now: float) -> list[Curve]:
    """Return the FLOP/s of each worker until `now`, or until the product ended."""
    end = record.end(now)
    times, rates = record.history.rates(end)
    if not record.over:  # the last bin lacks the tasks that run now
        times, rates = times[:-1], {name: values[:-1] for name, values in rates.items()}
    return _few(record, times, rates)


def memory(record: Record, now: float) -> list[Curve]:
    """Return the bytes of blocks on each worker until `now`, or until the product ended."""
    end = record.end(now) - record.submitted
    curves = {}
    for name, lane in record.lanes.items():
        thin = lane.samples[:: max(1, len(lane.samples) // POINTS)]
        points = np.array([(at - record.submitted, blocks) for at, blocks in thin], dtype=float).reshape(-1, 2)
        curves[name] = points[points[:, 0] <= end]
    if len(curves) <= MOST_CURVES:
        return [Curve(name, record.color(name), *curves[name].T) for name in sorted(curves, key=units.natural)]
    times = np.linspace(0, end, POINTS)
    values = {name: np.interp(times, *points.T) for name, points in curves.items() if len(points)}
    return _few(record, times, values)


def _few(record: Record, times: np.ndarray, values: Mapping[str, np.ndarray]) -> list[Curve]:
    """Return a curve for each worker, or `QUANTILES` if there are more than `MOST_CURVES`."""
    if len(values) <= MOST_CURVES:
        return [Curve(name, record.color(name), times, values[name]) for name in sorted(values, key=units.natural)]
    every = np.array(list(values.values()))
    return [Curve(name, color, times, np.quantile(every, part, axis=0)) for name, part, color in QUANTILES]

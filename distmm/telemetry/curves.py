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

# Points of a curve.
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

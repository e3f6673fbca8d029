"""The report of one product: a single HTML file without scripts or links, for a mail or an archive.

It shows a record (`distmm.telemetry.record`): the timeline of each worker; rate, memory and bytes moved beside those of
the plan; what went wrong; and what the check of C found.
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import dask
import distributed
import numpy as np

from distmm.telemetry import theme, units
from distmm.telemetry.record import Record
from distmm.telemetry.worker_totals import Lane
from distmm.versions import VERSION

if TYPE_CHECKING:
    from distmm.telemetry.charts import Interval

__all__ = ["html", "write"]

Rows = Sequence[tuple[str, str]]

# Points of the rate's curve, and of a worker's curve of memory.
RATE_POINTS, MEMORY_POINTS = 200, 120


def write(path: str | Path, record: Record, *, title: str = "", certificate: Rows = ()) -> Path:
    """Write the report of a product, whole or not at all.

    Parameters
    ----------
    path : str or path
        A file of this name is replaced.
    record : Record
    title : str, optional
        By default the record's.
    certificate : sequence of (str, str), optional
        What is known of the check of C, as labels and values.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(html(record, title=title, certificate=certificate), encoding="utf-8")
    draft.replace(path)
    return path


def html(record: Record, *, title: str = "", certificate: Rows = ()) -> str:
    """Return the report of a product as one HTML document; for the parameters see `write`."""
    from distmm.telemetry import charts  # and matplotlib, half a second that a product without a report need not wait

    begin, lanes = (
        record.started or record.submitted,
        sorted(record.lanes.items(), key=lambda lane: units.natural(lane[0])),
    )
    seconds = max(1e-3, (record.stopped or begin) - begin)
    plan = record.plan
    return PAGE.format(
        light=_variables(theme.LIGHT),
        dark=_variables(theme.DARK),
        title=escape(title or record.title),
        summary=_table(_summary(record)),
        plan=_table(plan.rows()),
        timeline=charts.timeline(seconds, _activity(record, begin, seconds, lanes)),
        rate=charts.lines(
            seconds,
            [("all workers", *_rate(record, begin, seconds))],
            (plan.cluster.rate * len(lanes), "the kernel's rate in the plan, times the workers"),
            "FLOP/s",
        ),
        memory=charts.lines(
            seconds,
            [(name, *_memory(lane, begin, seconds)) for name, lane in lanes],
            (plan.cost.peak_bytes, "the plan's peak"),
            "B",
        ),
        transfers=charts.bars(
            [(name, lane.received) for name, lane in lanes],
            (plan.cost.bytes_bound / plan.grid.size, "even share of the 2-D bound"),
            "B",
        ),
        certificate=_certificate(record, certificate),
        incidents=_incidents(record, begin),
        versions=escape(
            f"distmm {VERSION}, dask {dask.__version__}, distributed {distributed.__version__}, "
            f"Python {platform.python_version()}; written {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        ),
    )


def _summary(record: Record) -> list[tuple[str, str]]:
    f = record.figures(record.stopped or record.submitted)
    planned = record.plan.cluster.rate * max(1, len(record.lanes))
    peak = max((lane.peak_blocks for lane in record.lanes.values()), default=0)
    busy = sum(lane.seconds for lane in record.lanes.values())
    return [
        ("state", f"{f.state}, {f.blocks_done} of {f.blocks} blocks, {f.done} of {f.total} steps"),
        ("checked", _checked(record)),
        (
            "time",
            f"{units.duration(f.seconds)}, the workers busy {busy / max(1e-9, f.seconds * len(record.lanes)):.0%}",
        ),
        ("rate", f"{units.scaled(f.rate, 'FLOP/s')}, {f.rate / planned:.0%} of the kernels' rate in the plan"),
        ("moved", f"{units.size(f.moved)} between workers, 2-D bound {units.size(f.bound)}"),
        (
            "memory",
            f"{units.size(peak)} of blocks on a worker at most, {units.size(record.plan.cost.peak_bytes)} planned",
        ),
        *([("error", f.error)] if f.error else []),
        ("trouble", f"{f.failed} failures, {f.interrupted} interrupted, {f.again} computed again"),
        ("resumed", f"{f.resumed} blocks were on disk already"),
    ]


def _activity(
    record: Record, begin: float, seconds: float, lanes: list[tuple[str, Lane]]
) -> list[tuple[str, list[Interval], list[Interval], float | None]]:
    runs: defaultdict[str, list[Interval]] = defaultdict(list)
    transfers: defaultdict[str, list[Interval]] = defaultdict(list)
    for run in record.runs:
        runs[run.worker].append((run.start - begin, run.stop - begin))
    for transfer in record.transfers:
        transfers[transfer.worker].append(
            (max(0.0, transfer.start - begin), min(max(0.0, transfer.stop - begin), seconds))
        )
    return [
        (name, runs[name], transfers[name], None if lane.lost is None else max(0.0, lane.lost - begin))
        for name, lane in lanes
    ]


def _rate(record: Record, begin: float, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """FLOP/s of all workers over time: each run's operations, spread evenly over its time."""
    edges = np.linspace(0, max(seconds, 1e-3), RATE_POINTS + 1)
    starts = np.array([run.start - begin for run in record.runs])
    stops = np.array([run.stop - begin for run in record.runs])
    flops = np.array([record.step_flops[run.chain, run.step] for run in record.runs])
    # Operations done by the time t, summed over runs, is a sum of ramps; its differences over the bins are the rates.
    order = np.argsort(np.concatenate([starts, stops]))
    times = np.concatenate([starts, stops])[order]
    speeds = flops / np.maximum(stops - starts, 1e-9)
    slope = np.cumsum(np.concatenate([speeds, -speeds])[order])
    done = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(times))]) if len(times) else np.zeros(0)
    by_edge = np.interp(edges, times, done) if len(times) else np.zeros(RATE_POINTS + 1)
    return (edges[:-1] + edges[1:]) / 2, np.diff(by_edge) / np.diff(edges)


def _memory(lane: Lane, begin: float, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    during = [(at - begin, blocks) for at, blocks, _ in lane.samples if 0 <= at - begin <= seconds]
    samples = np.array(during).reshape(-1, 2)
    thin = samples[:: max(1, len(samples) // MEMORY_POINTS)]
    return thin[:, 0], thin[:, 1]


def _certificate(record: Record, rows: Rows) -> str:
    return _table([("as they were made", _checked(record)), *rows])


def _checked(record: Record) -> str:
    passed = int(record.certified.sum())
    if not passed and not record.refutations:
        return "not checked"
    wrong = f", {int(record.refuted.sum())} of them not made right since" if record.refuted.any() else ""
    return f"{passed} blocks passed, {record.refutations} failed{wrong}"


def _incidents(record: Record, begin: float) -> str:
    rows = [(f"{incident.time - begin:.1f} s", str(incident)) for incident in record.incidents]
    return _table(rows) if rows else "<p>None.</p>"


def _table(rows: Rows) -> str:
    lines = (f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in rows)
    return f"<table>{''.join(lines)}</table>"


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>distmm: {title}</title>
<style>
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
body {{ background: var(--ground); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; max-width: 1040px;
        margin: 2em auto; padding: 0 1em; }}
h1 {{ font-size: 1.35em; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.05em; margin: 2em 0 .5em; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: .15em 1.5em .15em 0; }}
th {{ font-weight: 600; color: var(--muted); white-space: nowrap; }}
svg {{ width: 100%; display: block; }}
svg {{ font-family: system-ui, sans-serif; }}
footer, p.note {{ color: var(--muted); font-size: .87em; }}
@media print {{ svg, table {{ break-inside: avoid; }} }}
</style>
<h1>{title}</h1>
{summary}
<h2>Plan</h2>
{plan}
<h2>Timeline</h2>
<p class="note">A lane is a worker: its products above, the transfers of their inputs below, its loss in red.</p>
{timeline}
<h2>Rate</h2>
{rate}
<h2>Memory of blocks, by worker</h2>
{memory}
<h2>Received from other workers</h2>
{transfers}
<h2>Certificate</h2>
{certificate}
<h2>Incidents</h2>
{incidents}
<footer><p>{versions}</p></footer>
</html>
"""

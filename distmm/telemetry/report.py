"""The report of one product: a single HTML file without scripts or links, to send by mail or to archive.

It shows a record (`distmm.telemetry.record`): the timeline of each worker; rate, memory and bytes moved, compared with
the plan; incidents; and the result of the check of C.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import distributed

from distmm.telemetry import curves, slowness, theme, units
from distmm.telemetry.batch_job import batch_job
from distmm.telemetry.record import Record
from distmm.telemetry.worker_totals import Lane
from distmm.versions import __version__

if TYPE_CHECKING:
    from distmm.telemetry.charts import Activity

__all__ = ["html", "write"]

Rows = Sequence[tuple[str, str]]


def write(path: str | Path, record: Record, **options: Any) -> Path:
    """Write the report of a product. The write is atomic and replaces an existing file.

    Parameters
    ----------
    path : str or path
        Name of the HTML file.
    record : Record
        See `distmm.telemetry.client.read`.
    **options
        Keyword arguments of `html`.

    Returns
    -------
    Path
        Where the report is.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(html(record, **options), encoding="utf-8")
    draft.replace(path)
    return path


def html(record: Record, *, title: str = "", certificate: Rows = (), runs: Sequence[Sequence[str]] = ()) -> str:
    """Return the report of a product as one HTML document.

    Parameters
    ----------
    record : Record
    title : str, optional
        By default the title of the record.
    certificate : sequence of (str, str), optional
        Facts about the check of C, as labels and values.
    runs : sequence of sequences of str, optional
        For a resumed job: a row of labels, then a row for each run.

    Returns
    -------
    str
        The HTML document.
    """
    from distmm.telemetry import charts  # here, because matplotlib takes half a second to import

    lanes = sorted(record.lanes.items(), key=lambda lane: units.natural(lane[0]))
    end = max(record.advanced, record.submitted + 1e-3)
    seconds, plan = end - record.submitted, record.plan
    return PAGE.format(
        light=_variables(theme.LIGHT),
        dark=_variables(theme.DARK),
        title=escape(title or record.title),
        summary=_table(_summary(record)),
        plan=_table(plan.rows()),
        timeline=charts.timeline(seconds, _activity(record, lanes)),
        rate=charts.lines(
            seconds,
            curves.rate(record, end),
            (plan.cluster.rate, "the kernel's rate in the plan"),
            "FLOP/s",
        ),
        memory=charts.lines(
            seconds,
            curves.memory(record, end),
            (plan.cost.peak_bytes, "the plan's peak"),
            "B",
        ),
        transfers=charts.bars(
            [(name, record.color(name), lane.received) for name, lane in lanes],
            (plan.cost.bytes_bound / plan.grid.size, "even share of the 2-D bound"),
            "B",
        ),
        certificate=_certificate(record, certificate),
        slowness="".join(f"<li>{escape(text)}</li>" for text in slowness.reasons(record, end) or ["Nothing."]),
        runs=_runs(runs),
        colors=", ".join(
            f'<span style="color: {color}">{what}</span>'
            for what, color in (("transfers", theme.MARK), ("reads", theme.READ), ("checks and writes", theme.WRITTEN))
        ),
        incidents=_incidents(record),
        versions=escape(
            f"distmm {__version__}, dask {dask.__version__}, distributed {distributed.__version__}, "
            f"Python {platform.python_version()}; written {units.date(time.time())}"
        ),
    )


def _summary(record: Record) -> list[tuple[str, str]]:
    f = record.figures(record.stopped or record.submitted)
    planned = record.plan.cluster.rate * max(1, len(record.lanes))
    peak = max((lane.peak_blocks for lane in record.lanes.values()), default=0)
    busy = sum(lane.seconds for lane in record.lanes.values())
    return [
        ("state", f"{f.state}, {f.blocks_done} of {f.blocks} blocks, {f.done} of {f.total} steps"),
        ("started", units.date(record.submitted)),
        ("ended" if record.over else "last step", units.date(record.advanced)),
        ("host", platform.node()),
        *([("batch job", job)] if (job := batch_job()) else []),
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
        ("faults", f"{f.failed} failures, {f.interrupted} interrupted, {f.again} computed again"),
        ("resumed", f"{f.resumed} blocks were on disk already"),
    ]


def _activity(record: Record, lanes: list[tuple[str, Lane]]) -> list[Activity]:
    from distmm.telemetry.charts import Activity

    begin = record.submitted
    found = {name: Activity(name, record.color(name)) for name, _ in lanes}
    for run in record.runs:
        found[run.worker].runs.append((run.start - begin, run.stop - begin))
    for transfer in record.transfers:
        if transfer.worker in found:
            found[transfer.worker].transfers.append((transfer.start - begin, transfer.stop - begin))
    for access in record.accesses:
        lane = found[access.worker]
        (lane.writes if access.writes else lane.reads).append((max(0.0, access.start - begin), access.stop - begin))
    for name, of in lanes:
        found[name].lost = None if of.lost is None else max(0.0, of.lost - begin)
    return list(found.values())


def _certificate(record: Record, rows: Rows) -> str:
    return _table([("block by block", _checked(record)), *rows])


def _checked(record: Record) -> str:
    passed = int(record.certified.sum())
    if not passed and not record.refutations:
        return "not checked"
    wrong = f", {int(record.refuted.sum())} of them not corrected yet" if record.refuted.any() else ""
    return f"{passed} blocks passed, {record.refutations} failed{wrong}"


def _runs(runs: Sequence[Sequence[str]]) -> str:
    if not runs:
        return ""
    rows = (
        "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row)
        for row, cell in zip(runs, ["th", *["td"] * (len(runs) - 1)], strict=True)
    )
    return f"<h2>Runs</h2><table><tr>{'</tr><tr>'.join(rows)}</tr></table>"


def _incidents(record: Record) -> str:
    rows = [(f"{incident.time - record.submitted:.1f} s", str(incident)) for incident in record.incidents]
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
{runs}
<h2>What made it slower than planned</h2>
<ul>{slowness}</ul>
<h2>Plan</h2>
{plan}
<h2>Timeline</h2>
<p class="note">Each lane shows a worker: its products in its colour, below them {colors}, and its loss in red.
Times start when the product was submitted.</p>
{timeline}
<h2>Rate of the workers</h2>
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

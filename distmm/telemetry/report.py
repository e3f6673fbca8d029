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
from typing import Any

import dask
import distributed

from distmm.telemetry import curves, theme, units
from distmm.telemetry.batch_job import batch_job
from distmm.telemetry.facts import checked, facts
from distmm.telemetry.record import Record
from distmm.versions import __version__

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
    seconds, plan, f = end - record.submitted, record.plan, record.figures(end)
    job = batch_job()
    summary = [
        *((fact.label, fact.value) for fact in facts(record, f, end)),
        ("host", platform.node()),
        *([("batch job", job)] if job else []),
    ]
    return PAGE.format(
        light=_variables(theme.LIGHT),
        dark=_variables(theme.DARK),
        title=escape(title or record.title),
        summary=_table([("product", record.shape), *summary]),
        plan=_table(plan.rows()),
        timeline=charts.timeline(record, seconds),
        rate=charts.lines(
            seconds, curves.rate(record, end), (plan.cluster.rate, "the kernel's rate in the plan"), "FLOP/s"
        ),
        memory=charts.lines(seconds, curves.memory(record, end), (plan.cost.peak_bytes, "the plan's peak"), "B"),
        transfers=charts.bars(
            [(name, record.color(name), lane.received) for name, lane in lanes],
            (plan.cost.bytes_bound / plan.grid.size, "even share of the 2-D bound"),
            "B",
        ),
        certificate=_table([("block by block", checked(record)), *certificate]),
        slowness="".join(f"<li>{escape(text)}</li>" for text in f.reasons or ["Nothing."]),
        runs=_runs(runs),
        colors=", ".join(
            f'<span style="color: {color}">{what}</span>' for what, color in theme.ACTIVITIES.values() if what
        ),
        incidents=_incidents(record),
        versions=escape(
            f"distmm {__version__}, dask {dask.__version__}, distributed {distributed.__version__}, "
            f"Python {platform.python_version()}; written {units.date(time.time())}"
        ),
    )


def _runs(runs: Sequence[Sequence[str]]) -> str:
    if not runs:
        return ""
    rows = (
        "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row)
        for row, cell in zip(runs, ["th", *["td"] * (len(runs) - 1)], strict=True)
    )
    return f"<h2>Runs</h2><table><tr>{'</tr><tr>'.join(rows)}</tr></table>"


def _incidents(record: Record) -> str:
    times = ((f"{units.clock(each.time)} ({each.time - record.submitted:.1f} s)", each) for each in record.incidents)
    rows = [(at, str(incident)) for at, incident in times]
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
<p class="note">Each lane shows a worker: its steps in its colour, below them {colors}.
Its silences are grey, its loss is red.
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

"""The report of one product: a single HTML file without scripts or links, to send by mail or to archive.

It shows a record (`distmm.telemetry.record`): the timeline of each worker; rate and memory, compared with the
plan; incidents; and the result of the check of C.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dask
import distributed

from distmm import templates, units
from distmm.storage.records import DISK
from distmm.telemetry import charts, theme
from distmm.telemetry.batch_job import batch_job
from distmm.telemetry.facts import checked, facts
from distmm.telemetry.record import Record
from distmm.versions import __version__

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
    DISK.write(os.path.abspath(path), html(record, **options).encode())
    return Path(path)


def html(record: Record, *, title: str = "", certificate: Rows = (), runs: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the report of a product as one HTML document.

    Parameters
    ----------
    record : Record
    title : str, optional
        By default the title of the record.
    certificate : sequence of (str, str), optional
        Facts about the check of C, as labels and values.
    runs : sequence of mappings, optional
        The runs of a job, as its manifest has them. They are shown if there are several. The last one ends now, if it
        has no end yet.

    Returns
    -------
    str
        The HTML document.
    """
    end = max(record.advanced, record.submitted + 1e-3)
    seconds, plan, f = end - record.submitted, record.plan, record.figures(end)
    summary = [
        *((fact.label, fact.value) for fact in facts(record, f)),
        ("host", platform.node()),
        *([("batch job", job)] if (job := batch_job()) else []),
    ]
    return templates.filled(
        theme.PAGES / "report.html",
        theme=theme,
        title=title or record.title,
        summary=[("product", record.shape), *summary],
        timeline=charts.timeline(record, seconds),
        rate=charts.lines(
            seconds, charts.rate(record, end), (plan.cluster.rate, "the kernel's rate in the plan"), "FLOP/s"
        ),
        memory=charts.lines(seconds, charts.memory(record, end), (plan.peak.worker, "the plan's peak"), "B"),
        certificate=[("block by block", checked(record)), *certificate],
        reasons=f.reasons or ["Nothing that takes a second."],
        runs=runs,
        now=time.time(),
        units=units,
        record=record,
        versions=f"distmm {__version__}, dask {dask.__version__}, distributed {distributed.__version__}, "
        f"Python {platform.python_version()}; written {units.date(time.time())}",
    )

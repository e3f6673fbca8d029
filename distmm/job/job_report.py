"""The report of a run, a page that telemetry makes of what it has seen: beside C, complete or not.

Where the scheduler is lost there is nobody to ask; where the disk is full the job says so itself.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from distributed import Client

from distmm.checking.verdict import of_tolerance
from distmm.errors import InputError
from distmm.job.computation import Computation
from distmm.job.folder import Folder, Json
from distmm.job.lock import Lock
from distmm.job.runs import table
from distmm.storage import is_url
from distmm.telemetry import client as telemetry
from distmm.telemetry import report
from distmm.telemetry.faults import tolerated

__all__ = ["of_failure", "of_run"]


def of_run(client: Client, folder: Folder, made: Computation, manifest: Json) -> None:
    """Write what was seen of a run beside C, unless another process has taken over the job."""
    if made.stop.at_once:
        return
    try:
        Lock.check(folder.path, made.job)
    except (InputError, OSError):  # the error of the run itself says so
        return
    retired = [
        ("taken out", f"worker {one['worker']} of {one['host']}, {one['wrong']} of whose blocks were wrong")
        for one in made.faulty.retired
    ]
    rows = [
        ("blocks", f"{made.written} written in this run, {len(made.rejected)} rejected and made again"),
        *retired,
        ("largest error", "not measured" if made.residual is None else of_tolerance(made.residual)),
        ("in full", folder.certificate if made.writer.tolerance is not None else "blocks were not checked"),
    ]
    _write(client, folder, made.job, rows, manifest["runs"], os.path.join(folder.work, "report.draft"))


def of_failure(client: Client, folder: Folder, job: str, runs: list[Json]) -> None:
    """Write what was seen of a job whose result is wrong as a whole beside it: the files of the job are gone."""
    _write(client, folder, job, [], runs)


def _write(
    client: Client,
    folder: Folder,
    job: str,
    rows: list[tuple[str, str]],
    runs: list[Json],
    draft: str | None = None,
) -> None:
    if client.status != "running":
        return
    with suppress(OSError, TimeoutError), tolerated("the report of a job"):
        record = telemetry.read(client, job)
        if record is None:
            return
        text = report.html(record, title=folder.target, certificate=rows, runs=table(runs, time.time()))
        if draft is None or is_url(folder.path) or os.path.isdir(os.path.dirname(draft)):  # or another has taken over
            folder.store.write(folder.report, text.encode(), draft)

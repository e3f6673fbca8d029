"""The report of a run, a page that telemetry makes of what it has seen: beside C, whether C is complete or not.

Where the scheduler is lost there is nobody to ask; where the disk is full the job says so itself.
"""

from __future__ import annotations

import os
from contextlib import suppress

from distributed import Client

from distmm.checking.verdict import of_tolerance
from distmm.job.computation import Computation
from distmm.job.folder import Folder
from distmm.storage import is_url
from distmm.telemetry import client as telemetry
from distmm.telemetry import report
from distmm.telemetry.faults import tolerated

__all__ = ["of_failure", "of_run"]


def of_run(client: Client, folder: Folder, made: Computation) -> None:
    """Write what was seen of a run to where it stands until C is complete."""
    if made.stop.at_once:
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
    _write(client, folder, folder.pending_report, made.job, rows)


def of_failure(client: Client, folder: Folder, job: str) -> None:
    """Write what was seen of a job whose result is wrong as a whole beside it: the files of the job are gone."""
    _write(client, folder, folder.report, job, [])


def _write(client: Client, folder: Folder, path: str, job: str, rows: list[tuple[str, str]]) -> None:
    if client.status != "running":
        return
    with suppress(OSError, TimeoutError), tolerated("the report of a job"):
        record = telemetry.read(client, job)
        if record is None:
            return
        if is_url(folder.path):
            folder.store.write(path, report.html(record, title=folder.target, certificate=rows).encode())
        elif os.path.isdir(os.path.dirname(path)):  # or another job has taken over
            report.write(path, record, title=folder.target, certificate=rows)

"""The report of a run next to C: an HTML page of telemetry's records. Runs that fail have one, too.

There is no report if the scheduler is lost, or if the report cannot be written. The job's own error explains both.
"""

from __future__ import annotations

import os
from contextlib import suppress

from distributed import Client

from distmm.checking.verdict import of_tolerance
from distmm.errors import InputError
from distmm.job.computation import Computation
from distmm.job.folder import Folder, Json
from distmm.job.lock import Lock
from distmm.storage import is_url
from distmm.telemetry import client as telemetry
from distmm.telemetry import report
from distmm.telemetry.faults import tolerated
from distmm.telemetry.report import Rows


def of_run(client: Client, folder: Folder, made: Computation, manifest: Json) -> None:
    """Write the report of a run next to C, unless another process has taken over the job."""
    if made.stop.at_once:
        return
    try:
        Lock.check(folder.path, made.job)
    except (InputError, OSError):  # the run itself fails with the same error
        return
    rows = [
        ("blocks", f"{made.written} written in this run, {len(made.rejected)} rejected and computed again"),
        ("largest error", "not measured" if made.residual is None else of_tolerance(made.residual)),
        ("certificate", folder.certificate if made.writer.judge.tolerance is not None else "blocks were not checked"),
    ]
    write(client, folder, made.job, manifest["runs"], rows, folder.work)


def write(
    client: Client, folder: Folder, job: str, runs: list[Json], rows: Rows = (), drafts: str | None = None
) -> None:
    """Write the report of a run next to C, also of a job whose whole result is wrong. `rows` are on the certificate.

    `drafts` is the folder for the incomplete file. A job whose result is wrong has none: its files are removed.
    """
    if client.status != "running":
        return
    with suppress(OSError, TimeoutError), tolerated("the report of a job"):
        record = telemetry.read(client, job)
        if record is None:
            return
        text = report.html(record, title=folder.target, certificate=rows, runs=runs)
        # If another job has taken over, the folder for drafts does not exist.
        if drafts is None or is_url(folder.path) or os.path.isdir(drafts):
            folder.store.write({folder.report: text.encode(errors="backslashreplace")}, drafts)

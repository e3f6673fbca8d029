"""The progress of a job. It is read from the files next to C, so any machine with access to them can show it."""

from __future__ import annotations

import math
import os
import shlex
import time
from dataclasses import dataclass

from distmm import units
from distmm.errors import InputError
from distmm.job.folder import Folder
from distmm.job.lock import holder
from distmm.job.records import continuation, read_certificate, read_manifest
from distmm.planning.blocks import even_edges
from distmm.storage import is_there, stamp_of
from distmm.telemetry.time_left import Pace


@dataclass(frozen=True)
class Status:
    """The progress of a job.

    Attributes
    ----------
    path : str
        Path of C.
    state : {"running", "stopped", "failed", "complete", "changed", "missing"}
        A job whose process has died is stopped. One whose last run ended with an error has failed. If C was complete,
        and its files were written or copied since, it is changed, and `distmm verify` says whether it is right. If they
        were removed or renamed, it is missing.
    done, total : int
        Number of finished blocks of C (or block rows), and of all blocks.
    runs, rejected : int
        Number of runs, and number of blocks that failed their check and were computed again.
    owner : str or None
        Process and host of a running job.
    seconds_left : float or None
        Predicted from the rate of this run's last blocks. None if the job is not running, or has finished no block yet.
    certificate : str or None
        Path of the certificate of a complete job.
    report : str or None
        Path of the report of the last run that ended.
    error : str or None
        Error of the last run of a job that has failed.
    ended : float or None
        End of the last run of a job that is stopped or failed, in seconds since the epoch. None if it was killed.
    continue_with : str or None
        Command that goes on with a job that is stopped or failed.
    """

    path: str
    state: str
    done: int
    total: int
    runs: int
    rejected: int
    owner: str | None = None
    seconds_left: float | None = None
    certificate: str | None = None
    report: str | None = None
    error: str | None = None
    ended: float | None = None
    continue_with: str | None = None

    def rows(self) -> list[tuple[str, str]]:
        """Return it as a table of label and value."""
        rows = [
            ("state", self.state if self.owner is None else f"{self.state}, {self.owner}"),
            ("blocks", f"{self.done} of {self.total} ({100 * self.done / max(1, self.total):.0f} %)"),
            ("runs", f"{self.runs}, {self.rejected} blocks computed again"),
        ]
        path, left = shlex.quote(self.path), self.seconds_left
        more = {
            "left": None if left is None else f"about {units.duration(left)}",
            "certificate": self.certificate,
            "report": self.report,
            "error": self.error,
            "ended": None if self.ended is None else units.date(self.ended),
            "continue with": self.continue_with,
            "check with": f"distmm verify {path}" if self.state == "changed" else None,
            "compute again with": f"distmm multiply ... -o {path}" if self.state == "missing" else None,
        }
        return rows + [(label, value) for label, value in more.items() if value is not None]


def status(out: str | os.PathLike[str]) -> Status:
    """Return the progress of a job, from the files next to its output.

    Parameters
    ----------
    out : str or path
        Name of C, as it was given to `multiply`.

    Returns
    -------
    Status
        State, finished blocks and time left. It needs no cluster.

    Raises
    ------
    InputError
        If there is neither an unfinished job nor a certificate.

    Examples
    --------
    >>> distmm.status("C.zarr").state  # doctest: +SKIP
    'complete'
    """
    folder = Folder.of(out)
    if folder.exists():
        manifest = read_manifest(folder)
        markers = folder.of_job(manifest["id"]).markers()
        (m, n), (edge_m, _, edge_n) = manifest["output"]["shape"], manifest["blocks"]
        reduced = manifest["spec"]["reduction"] is not None  # then units are whole block rows
        total = len(even_edges(m, edge_m)) * (1 if reduced else len(even_edges(n, edge_n)))
        counts = len(markers), total, len(manifest["runs"]), manifest["rejected"]
        owner = holder(folder.path)
        if owner is None or owner.stale:
            last = manifest["runs"][-1] if manifest["runs"] else {}
            error, state = last.get("error"), "failed" if "error" in last else "stopped"
            again = continuation(last, folder.target)
            return Status(
                folder.target, state, *counts, report=_report(folder), error=error, ended=last.get("ended"),
                continue_with=again,
            )  # fmt: skip
        pace = Pace(manifest["runs"][-1]["started"])
        for written in sorted(marker["time"] for marker in markers.values()):
            if written >= pace.times[0]:
                pace.add(written, 1)
        left = pace.left(time.time(), total - len(markers))
        process = f"process {owner.pid} on {owner.host}"
        return Status(folder.target, "running", *counts, process, left if math.isfinite(left) else None)
    content = read_certificate(folder)
    if content is not None:
        done, state = len(content["done"]), "complete"
        if not is_there(folder.target):
            state = "missing"
        elif "stamp" in content and content["stamp"] != stamp_of(folder.target):
            state = "changed"
        counts = done, done, len(content["runs"]), content["rejected"]
        return Status(folder.target, state, *counts, certificate=folder.certificate, report=_report(folder))
    raise InputError(
        f"{folder.target}: there is no unfinished job ({folder.path}) and no certificate ({folder.certificate}); check "
        f"the name, or begin with distmm multiply"
    )


def _report(folder: Folder) -> str | None:
    return folder.report if folder.store.exists(folder.report) else None

"""What is said of a run: its summary, which `multiply` and `resume` return, and its report, an HTML page next to C.

Runs that fail have a report, too. There is none if the scheduler is lost, or if the report cannot be written. The job's
own error explains both.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from distributed import Client

from distmm import units
from distmm.checking.verdict import of_tolerance
from distmm.errors import InputError
from distmm.job.computation import Computation
from distmm.job.folder import Folder, Json
from distmm.job.lock import Lock
from distmm.planning.plan import Plan
from distmm.storage import is_url
from distmm.telemetry import client as telemetry
from distmm.telemetry import report
from distmm.telemetry.faults import tolerated
from distmm.telemetry.report import Rows


@dataclass(frozen=True)
class Made:
    """The figures of one run. `Summary` explains each of them."""

    kept: int
    recomputed: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes_moved: int = 0


@dataclass(frozen=True, kw_only=True)
class Summary(Made):
    """The result of a job: C, the figures of the run, and the check.

    Attributes
    ----------
    path : str
        Path of C.
    shape, dtype
        Shape and type of C.
    plan : Plan or None
        None if C was already complete.
    seconds : float
        Duration of this run, from the first task to the last block on disk.
    flops : float
        Number of floating-point operations of this run.
    bytes_moved : int
        Bytes that workers received from one another in this run.
    blocks, kept : int
        Number of blocks of C, and number of those that an earlier run had finished. Block rows if C is reduced.
    recomputed : int
        Number of blocks that failed their check in this run and were computed again.
    residual : float or None
        Largest error of a block divided by its tolerance for rounding: at most 1. None if blocks were not checked.
    certificate : str or None
        Path of the certificate. None if blocks were not checked, unless the product was added to a C.
    report : str or None
        Path of the report of this run. None if nothing had to be computed.
    missing : dict
        By path of an input: which of its chunks were missing when the job began, and were read as the fill value.
    entries : int or None
        Number of elements that are kept. None if C is not reduced.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    plan: Plan | None
    blocks: int
    residual: float | None
    certificate: str | None
    report: str | None
    missing: dict[str, str]
    entries: int | None = None

    @property
    def flops_per_second(self) -> float:
        """Operations per second, reading and writing included."""
        return self.flops / max(self.seconds, 1e-9)

    def rows(self) -> list[tuple[str, str]]:
        """Return the summary as a table of label and value."""
        planned = "" if self.plan is None else f", {units.size(self.plan.bytes_moved)} planned for all of C"
        m, n = self.shape
        kept = "" if self.entries is None else f"{self.entries:,} elements of "
        again = f", {self.recomputed} computed again" if self.recomputed else ""
        run = [
            ("time", f"{units.duration(self.seconds)}, reading and writing included"),
            ("rate", f"{units.scaled(self.flops_per_second, 'FLOP/s')} over that time"),
            ("moved", f"{units.size(self.bytes_moved)} between workers{planned}"),
        ]
        return [
            *(run if self.kept < self.blocks else [("run", "nothing was left to compute")]),
            (
                "blocks" if self.entries is None else "block rows",
                f"{self.blocks}, {self.kept} of them finished before{again}",
            ),
            ("error", "not checked" if self.residual is None else f"at most {of_tolerance(self.residual)}"),
            *[("input", f"{path}: {what}") for path, what in self.missing.items()],
            ("C" if self.entries is None else "result", f"{self.path} ({kept}{m} x {n}, {self.dtype})"),
            *([] if self.certificate is None else [("certificate", self.certificate)]),
            *([] if self.report is None else [("report", self.report)]),
        ]

    @classmethod
    def of(cls, folder: Folder, certificate: Json, plan: Plan | None, made: Made) -> Summary:
        """Summarise a complete C, and the run that completed it."""
        spec, output = certificate["spec"], certificate["output"]
        entries = None
        if spec["reduction"] is not None:
            entries = sum(marker["count"] for marker in certificate["done"]) * spec["reduction"].get("k", 1)
        return cls(
            path=folder.target,
            shape=tuple(output["shape"]),
            dtype=np.dtype(spec["dtype"]),
            entries=entries,
            plan=plan,
            blocks=len(certificate["done"]),
            residual=certificate["largest_residual"] or 0.0 if spec["check"] != "none" else None,
            certificate=folder.certificate if folder.store.exists(folder.certificate) else None,
            report=folder.report if plan is not None and folder.store.exists(folder.report) else None,
            missing=certificate["missing"],
            **asdict(made),
        )

    @classmethod
    def of_complete(cls, folder: Folder, certificate: Json) -> Summary:
        """Summarise a C that was complete before this run."""
        return cls.of(folder, certificate, None, Made(kept=len(certificate["done"])))


def write_report(client: Client, folder: Folder, made: Computation, manifest: Json) -> None:
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
    save_report(client, folder, made.job, manifest["runs"], rows, folder.work)


def save_report(
    client: Client, folder: Folder, job: str, runs: list[Json], rows: Rows = (), drafts: str | None = None
) -> None:
    """Write the report of a run next to C, also of a job whose whole result is wrong. `rows` are on the certificate.

    `drafts` is the folder for the incomplete file. A job whose result is wrong has none: its files are removed.
    """
    if client.status != "running":
        return
    with tolerated("the report of a job"), suppress(OSError, TimeoutError):
        record = telemetry.read(client, job)
        if record is None:
            return
        text = report.html(record, title=folder.target, certificate=rows, runs=runs)
        # If another job has taken over, the folder for drafts does not exist.
        if drafts is None or is_url(folder.path) or os.path.isdir(drafts):
            folder.store.write(folder.report, text.encode(errors="backslashreplace"), drafts)

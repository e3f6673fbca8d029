"""The summary of a finished job: what `multiply` and `resume` return."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from distmm.checking.verdict import of_tolerance
from distmm.job.folder import Folder, Json
from distmm.job.reduction import element_type
from distmm.planning.plan import Plan
from distmm.storage import open_matrix
from distmm.telemetry import units

__all__ = ["Made", "Summary"]


@dataclass(frozen=True)
class Made:
    """What one run has done for C. `Summary` explains each figure."""

    kept: int
    recomputed: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes_moved: int = 0


@dataclass(frozen=True)
class Summary:
    """What a finished product was, took and is worth.

    Attributes
    ----------
    path : str
        Where C is.
    shape, dtype
        Of C.
    plan : Plan or None
        None where C was complete already.
    seconds : float
        Of this run, from the first task to the last block on disk.
    flops : float
        Operations of this run.
    bytes_moved : int
        Bytes that workers received from one another meanwhile.
    blocks, kept : int
        Blocks of C in all, and those that an earlier run had finished; where C is reduced, block rows.
    recomputed : int
        Blocks that failed their test in this run and were made again.
    residual : float or None
        Largest error of a block over its tolerance for rounding: at most 1. None where nothing was checked.
    certificate : str or None
        Where the certificate is; None where nothing was checked, unless the product was added to a C.
    report : str or None
        Where the report of this run is; None where it had nothing to do.
    missing : dict
        By path of an input: what of it was not there when the job began, and was read as the fill value.
    entries : int or None
        Elements of C that are kept, where C is reduced; None where all of it is kept.
    """

    path: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    plan: Plan | None
    seconds: float
    flops: float
    bytes_moved: int
    blocks: int
    kept: int
    recomputed: int
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
        again = f", {self.recomputed} made again" if self.recomputed else ""
        return [
            ("time", f"{units.duration(self.seconds)}, reading and writing included"),
            ("rate", units.scaled(self.flops_per_second, "FLOP/s")),
            ("moved", f"{units.size(self.bytes_moved)} between workers{planned}"),
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
        if spec.get("reduction") is None:
            c = open_matrix(output["name"])
            shape, dtype = c.shape, c.dtype
        else:
            (rows, columns), dtype = output["shape"], element_type(spec["dtype"])
            shape = rows, columns
            entries = sum(marker["count"] for marker in certificate["done"]) * spec["reduction"].get("k", 1)
        checked = certificate["spec"]["check"] != "none"
        return cls(
            path=folder.target,
            shape=shape,
            dtype=dtype,
            entries=entries,
            plan=plan,
            blocks=len(certificate["done"]),
            residual=certificate["largest_residual"] or 0.0 if checked else None,
            certificate=folder.certificate if folder.store.exists(folder.certificate) else None,
            report=folder.report if plan is not None and folder.store.exists(folder.report) else None,
            missing=certificate.get("missing", {}),
            **asdict(made),
        )

    @classmethod
    def of_complete(cls, folder: Folder, certificate: Json) -> Summary:
        """Summarise a C that was complete before this run."""
        return cls.of(folder, certificate, None, Made(kept=len(certificate["done"])))

"""The results: a row for each case, as a table and as JSON. Efficiencies are computed from the seconds."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distmm.job.folder import write_json
from distmm.versions import installed
from experiment.cases import KERNEL, TYPES, Case, Experiment

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Results", "Row", "efficiency"]


def efficiency(rate: float, workers: int, alone: float) -> float:
    """Return the parallel efficiency ``rate / (p alone)``: p is the number of workers, ``alone`` the rate of one."""
    return rate / (workers * alone)


@dataclass(frozen=True)
class Row:
    """The measurement of a case, or the reason why there is none.

    Attributes
    ----------
    seconds : float or None
        Time from the call until the last block of C is computed. Of several products, it is the median.
    failure : str or None
        Reason why there is no measurement.
    ok, residual
        Result of the check of C: whether it is right, and the largest error divided by its bound.
    moved : int or None
        Bytes that workers received from one another; None if the program does not count them.
    predicted : float or None
        Seconds that the plan predicts.
    peak, planned_peak : int or None
        Most bytes on a GPU besides A and B: measured by RMM, and planned.
    variant : str
        The variant of the program that was measured: the kernel, or the best size of blocks.
    note : str
        The plan, or other information from the program.
    all_seconds : tuple of float
        Seconds of each repetition, in order.
    """

    case: Case
    seconds: float | None = None
    failure: str | None = None
    ok: bool | None = None
    residual: float | None = None
    moved: int | None = None
    predicted: float | None = None
    peak: int | None = None
    planned_peak: int | None = None
    variant: str = ""
    note: str = ""
    all_seconds: tuple[float, ...] = ()

    @property
    def rate(self) -> float | None:
        """FLOP/s."""
        return self.case.flops / self.seconds if self.seconds else None


@dataclass
class Results:
    """All rows of one run, and where it ran."""

    experiment: Experiment
    device: str = ""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def efficiency(self, row: Row) -> float | None:
        """Return the parallel efficiency relative to one worker in this run; None if one worker was not measured."""
        case = row.case
        for other in self.rows if case.program != KERNEL else ():
            alone = other.case
            same = (alone.program, alone.scaling, alone.place, alone.dtype) == (
                case.program, case.scaling, case.place, case.dtype,
            )  # fmt: skip
            if same and alone.workers == 1 and row.rate and other.rate:
                return efficiency(row.rate, case.workers, other.rate)
        return None

    def of_kernels(self, row: Row) -> float | None:
        """Return the rate divided by the number of workers times the rate of the kernel alone, of the same type."""
        for other in self.rows if row.case.program != KERNEL else ():
            if other.case.program == KERNEL and other.case.dtype == row.case.dtype and other.rate and row.rate:
                return efficiency(row.rate, row.case.workers, other.rate)
        return None

    def facts(self) -> dict[str, Any]:
        """Return all results as plain values: the rows with rates, efficiencies and bounds."""
        rows = []
        for row in self.rows:
            given = dataclasses.asdict(row)
            followed = {
                "tflops": row.rate and row.rate / 1e12,
                "efficiency": self.efficiency(row),
                "of_kernels": self.of_kernels(row),
                "bound": row.case.bound,
            }
            rows.append(given.pop("case") | given | followed)
        where = {"device": self.device, "cores": len(os.sched_getaffinity(0)), "machine": platform.platform()}
        return {
            **where,
            "versions": versions(),
            "experiment": dataclasses.asdict(self.experiment),
            "notes": self.notes,
            "rows": rows,
        }

    def write(self, path: Path) -> None:
        """Write all results as JSON. The file is replaced atomically: a reader sees the old or the new file, whole."""
        write_json(str(path.absolute()), self.facts())

    def table(self) -> Table:
        """Return the rows as a table, sorted by scaling, place and type."""
        from rich.table import Table

        failures = [f"{row.case}: {row.failure}" for row in self.rows if row.failure]
        table = Table(title=self.title, caption="\n".join([*self.notes, *failures]) or None, caption_justify="left")
        for heading in ("scaling", "A, B, C", "type", "program"):
            table.add_column(heading, no_wrap=True)
        unit = "GPUs" if self.experiment.device == "gpu" else "workers"
        for heading in (
            unit, "n", "seconds", "TFLOP/s", "efficiency", "of kernels", "GB moved", "2-D bound", "planned s", "off",
            "GB peak", "planned GB",
        ):  # fmt: skip
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("check", no_wrap=True)
        table.add_column("of bound", justify="right", no_wrap=True)
        previous = None
        for row in sorted(self.rows, key=_place_in_table):
            case = row.case
            group = (case.scaling, "" if case.scaling == KERNEL else case.place, case.dtype)
            if previous not in (None, group):
                table.add_section()
            table.add_row(
                *(group if previous != group else ("", "", "")),
                f"{case.program} {row.variant}".rstrip(),
                str(case.workers),
                str(case.n),
                _digits(row.seconds),
                _digits(row.rate and row.rate / 1e12),
                _share(self.efficiency(row)),
                _share(self.of_kernels(row)),
                _giga(row.moved),
                "" if row.moved is None else _giga(case.bound),
                _digits(row.predicted),
                "" if not (row.predicted and row.seconds) else f"{row.predicted / row.seconds - 1:+.0%}",
                _giga(row.peak),
                "" if row.peak is None else _giga(row.planned_peak),
                "failed" if row.failure else {True: "right", False: "WRONG", None: ""}[row.ok],
                _digits(row.residual),
            )
            previous = group
        return table

    @property
    def title(self) -> str:
        """Device, matrices and precision, in one line."""
        return f"{self.device or self.experiment.device}, N(0, 1), precision {self.experiment.precision}"


def _place_in_table(row: Row) -> tuple[Any, ...]:
    case = row.case
    first = [KERNEL, "strong", "weak", "resident", "host", "streamed", *TYPES]
    return (
        *(first.index(x) for x in (case.scaling, case.place, case.dtype)),
        case.program != "distmm",
        case.program,
        case.workers,
    )


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _giga(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e9:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that take part."""
    from distmm_kernels.bench.report import versions as of_kernels

    names = (
        "dask",
        "distributed",
        "dask-cuda",
        "distributed-ucxx-cu12",
        "distributed-ucxx-cu13",
        "rmm-cu12",
        "rmm-cu13",
    )
    return of_kernels() | installed(names)

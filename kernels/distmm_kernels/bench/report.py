"""The results of `race`, and tables to print."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Product:
    """The sizes of a product that was measured, and the type of its operands."""

    m: int
    k: int
    n: int
    dtype: str

    @property
    def size(self) -> str:
        """The sizes as text: one number if the product is square."""
        return str(self.m) if self.m == self.k == self.n else f"{self.m}x{self.k}x{self.n}"


@dataclass(frozen=True)
class Run(Product):
    """One contestant's result at one size (`distmm_kernels.bench.race` explains the terms).

    Attributes
    ----------
    contestant
        Name of a kernel, or of the peer.
    whole
        Whether the measured time includes the preparation of both operands. A peer needs no preparation.
    tflops, burst
        10^12 operations per second: sustained, and in the first milliseconds. A complex multiply-add counts as 8.
    ratio, burst_ratio
        Speed relative to the peer: sustained, and in the burst.
    error, worst
        Errors of sampled elements relative to a float64 product: norm of the error divided by the norm of the product,
        and the largest error divided by ``|A| |B|``.
    intensity
        Operations per byte of A, B and C.
    """

    precision: str
    out: str
    contestant: str
    whole: bool
    peer: str
    tflops: float
    burst: float
    ratio: float
    burst_ratio: float
    error: float
    worst: float
    intensity: float


@dataclass
class Results:
    """All runs of a race, and the device that it ran on.

    Attributes
    ----------
    copy_rate
        Bytes per second that a large copy on the device reads and writes.
    """

    device: str
    seed: int
    rounds: int
    versions: dict[str, str]
    copy_rate: float = 0.0
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a remark, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def table(self) -> Table:
        """Return the runs as a table for ``rich.console.Console().print``."""
        copied = f"copy on the device: {self.copy_rate / 1e12:.3g} TB/s, read and written" if self.copy_rate else None
        common, texts = ("operands", "precision", "result", "m x k x n"), ("contestant", "")
        figures = "TFLOP/s", "x cuBLAS", "burst", "x cuBLAS", "error", "worst"
        rows = (
            (
                *(run.dtype, run.precision, run.out, run.size),
                "cuBLAS" if run.contestant == run.peer else run.contestant,
                "" if run.contestant == run.peer else "whole" if run.whole else "prepared",
                *map(figure, (run.tflops, run.ratio, run.burst, run.burst_ratio)),
                f"{run.error:.2g}",
                f"{run.worst:.2g}",
            )
            for run in self.runs
        )
        return in_groups(f"{self.device}, {self.rounds} rounds", [copied, *self.notes], common, texts, figures, rows)


def in_groups(
    title: str,
    notes: Iterable[str | None],
    common: Sequence[str],
    texts: Sequence[str],
    figures: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> Table:
    """Return a table. Rows whose first columns, ``common``, are equal have one section, and show them once."""
    from rich.table import Table

    table = Table(title=title, caption="\n".join(filter(None, notes)) or None)
    for heading in (*common, *texts):
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right")
    for group, alike in itertools.groupby(rows, key=lambda row: row[: len(common)]):
        for i, row in enumerate(alike):
            table.add_row(*(group if i == 0 else [""] * len(common)), *row[len(common) :])
        table.add_section()
    return table


def figure(value: float | None) -> str:
    """Return three significant digits, or all digits of the integer part; an empty text for None."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that take part in a measurement."""
    found = {"python": platform.python_version()}
    for package in ("numpy", "numba", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x", "torch"):
        for each in metadata.distributions(name=package):
            found.setdefault(package, each.version)
    return found

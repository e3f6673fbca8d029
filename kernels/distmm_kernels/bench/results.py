"""The results of `race`, and their table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distmm_kernels.bench.report import figure, versions
from distmm_kernels.device import Device

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Run:
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

    m: int
    k: int
    n: int
    dtype: str
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

    @property
    def size(self) -> str:
        """The sizes as text: one number if the product is square."""
        return str(self.m) if self.m == self.k == self.n else f"{self.m}x{self.k}x{self.n}"


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

    @classmethod
    def of(cls, device: Device, seed: int, rounds: int) -> Results:
        """Start empty results for a device."""
        return cls(str(device), seed, rounds, versions())

    def note(self, text: str) -> None:
        """Add a remark, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def table(self) -> Table:
        """Return the runs as a table for ``rich.console.Console().print``."""
        from rich.table import Table

        lines = [f"copy on the device: {self.copy_rate / 1e12:.3g} TB/s, read and written"] if self.copy_rate else []
        table = Table(title=f"{self.device}, {self.rounds} rounds", caption="\n".join([*lines, *self.notes]) or None)
        for heading in ("operands", "precision", "result", "m x k x n", "contestant", ""):
            table.add_column(heading, no_wrap=True)
        for heading in ("TFLOP/s", "x cuBLAS", "burst", "x cuBLAS", "error", "worst"):
            table.add_column(heading, justify="right")
        previous = None
        for run in self.runs:
            group = (run.dtype, run.precision, run.out, run.size)
            if previous not in (None, group):
                table.add_section()
            table.add_row(
                *(group if previous != group else ("",) * 4),
                "cuBLAS" if run.contestant == run.peer else run.contestant,
                "" if run.contestant == run.peer else "whole" if run.whole else "prepared",
                *map(figure, (run.tflops, run.ratio, run.burst, run.burst_ratio)),
                f"{run.error:.2g}",
                f"{run.worst:.2g}",
            )
            previous = group
        return table

"""The results of `race`, and their table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distmm_kernels.bench.report import Product, figure, in_groups

if TYPE_CHECKING:
    from rich.table import Table


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

"""The results of `run` and of `race`, and tables to print."""

from __future__ import annotations

import dataclasses
import itertools
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from distmm_kernels import device as devices
from distmm_kernels.config import Problem
from distmm_kernels.device import Device

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
class Row(Product):
    """One product by one method.

    Attributes
    ----------
    seconds
        Median time of the product of operands that are in the device's memory.
    seconds_with_transfers
        Median time that includes the copies of A and B to the GPU and of C back; None on the CPU.
    gflops
        10^9 additions and multiplications per second. A complex multiply-add counts as 8.
    residual
        Frobenius norm of the difference from NumPy's product.
    loads
        Loads from global memory for one element of C; None if the method has no known number.
    vs_numpy, vs_cublas, vs_naive
        Speed relative to that method on the same product; None if that method was not measured.
    """

    method: str
    order: str
    seconds: float
    gflops: float
    residual: float
    seconds_with_transfers: float | None = None
    loads: int | None = None
    vs_numpy: float | None = None
    vs_cublas: float | None = None
    vs_naive: float | None = None

    @classmethod
    def of(cls, problem: Problem, order: str, method: str, seconds: float, **facts: Any) -> Row:
        """Make a row. Its rate is computed from the problem's size."""
        m, k, n = problem.m, problem.k, problem.n
        return cls(m, k, n, problem.dtype.name, method, order, seconds, problem.operations / seconds / 1e9, **facts)


@dataclass
class Report:
    """All rows of one run and where it ran."""

    device: str
    cpu: str
    cpu_cores: int
    seed: int
    repeat: int
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, device: Device, seed: int, repeat: int) -> Report:
        """Start an empty report for a device."""
        host = devices.cpu()
        return cls(str(device), host.name, host.multiprocessors, seed, repeat, versions())

    def add(self, rows: Iterable[Row]) -> None:
        """Add the rows of one product by all methods, and compute their relative speeds."""
        same = list(rows)
        seconds = {row.method: row.seconds for row in same}
        for row in same:
            ratio = {peer: taken / row.seconds for peer, taken in seconds.items()}
            self.rows.append(
                dataclasses.replace(
                    row, vs_numpy=ratio.get("NumPy"), vs_cublas=ratio.get("cublas"), vs_naive=ratio.get("naive")
                )
            )

    @property
    def title(self) -> str:
        """Device and settings of the measurement, in one line."""
        host = f"{self.cpu}, {self.cpu_cores} cores"
        return host if self.device == self.cpu else f"{self.device}; CPU: {host}"

    def answer(self) -> str | None:
        """Say whether shared memory doubled the speed in this measurement; None without a GPU."""
        lines = []
        for dtype in dict.fromkeys(row.dtype for row in self.rows):
            found = [row for row in self.rows if row.method == "tiled" and row.dtype == dtype and row.vs_naive]
            if found:
                ratios = sorted(row.vs_naive or 0.0 for row in found)
                largest = max(found, key=lambda row: (row.m * row.k * row.n, row.order == "C"))
                lines.append(
                    f"{dtype}: shared memory is {largest.vs_naive:.2f} times as fast as global loads at {largest.size} "
                    f"({largest.order} order); {ratios[0]:.2f} to {ratios[-1]:.2f} over all sizes"
                )
        return "\n".join(lines) or None

    def table(self) -> Table:
        """Return the rows as a table for ``rich.console.Console().print``."""
        measured = "time", "with transfers", "GFLOP/s", "‖C_np - C‖", "loads per element"
        figures = *measured, "x NumPy", "x cuBLAS", "x naive"
        rows = (
            (
                *(row.size, row.dtype, row.order, row.method),
                _time(row.seconds),
                _time(row.seconds_with_transfers),
                figure(row.gflops),
                f"{row.residual:.2g}",
                "" if row.loads is None else str(row.loads),
                *map(figure, (row.vs_numpy, row.vs_cublas, row.vs_naive)),
            )
            for row in self.rows
        )
        notes = [self.answer(), *self.notes]
        return in_groups(self.title, notes, ("m x k x n", "type", "order"), ("method",), figures, rows)


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


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    scale, unit = next((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if seconds >= s or s == 1e-6)
    return f"{seconds / scale:.3g} {unit}"


def figure(value: float | None) -> str:
    """Return three significant digits, or all digits of the integer part; an empty text for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that take part in a measurement."""
    found = {"python": platform.python_version()}
    for package in ("numpy", "numba", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x", "torch"):
        for each in metadata.distributions(name=package):
            found.setdefault(package, each.version)
    return found

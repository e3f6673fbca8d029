"""The results of the ladder, and a table to print."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distmm_kernels import device as devices
from distmm_kernels.bench.report import Product, figure, in_groups, versions
from distmm_kernels.config import Problem
from distmm_kernels.device import Device

if TYPE_CHECKING:
    from rich.table import Table


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


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    scale, unit = next((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if seconds >= s or s == 1e-6)
    return f"{seconds / scale:.3g} {unit}"

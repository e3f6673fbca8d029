"""The race of our kernels with cuBLAS."""

from __future__ import annotations

from distmm_kernels.bench.race import HEATS, SIZES, Heat, race
from distmm_kernels.bench.report import Results, Run

__all__ = ["HEATS", "SIZES", "Heat", "Results", "Run", "race"]

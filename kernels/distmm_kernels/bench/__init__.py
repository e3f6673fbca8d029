"""Experiments: `run` compares all methods, and `race` compares kernels with cuBLAS."""

from __future__ import annotations

from distmm_kernels.bench.experiment import run
from distmm_kernels.bench.race import HEATS, SIZES, Heat, race
from distmm_kernels.bench.report import Report, Results, Row, Run

__all__ = ["HEATS", "SIZES", "Heat", "Report", "Results", "Row", "Run", "race", "run"]

"""Experiments: `run` compares all methods, `race` compares kernels with cuBLAS, `of_this_gpu` measures all rates."""

from __future__ import annotations

from distmm_kernels.bench.experiment import run
from distmm_kernels.bench.model_rates import of_this_gpu
from distmm_kernels.bench.race import HEATS, SIZES, Heat, race
from distmm_kernels.bench.report import Report, Row
from distmm_kernels.bench.results import Results, Run

__all__ = ["HEATS", "SIZES", "Heat", "Report", "Results", "Row", "Run", "of_this_gpu", "race", "run"]

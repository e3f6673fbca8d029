"""The source programs' own experiment: the same product by every method, side by side."""

from __future__ import annotations

from distmm_kernels.bench.experiment import run
from distmm_kernels.bench.report import Report, Row

__all__ = ["Report", "Row", "run"]

"""A small product whose C is streamed: operands, the memory that is just enough, and what the plugin keeps of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from distributed import Scheduler

import distmm
from distmm.planning.plan import Plan
from distmm.scheduler.plugin import PlacementPlugin

EDGE = 20
M, K, N = 8 * EDGE, 2 * EDGE, 8 * EDGE
TEXT = f"g2x2x1 b{EDGE}x{EDGE}x{EDGE} p1 w4x4 l2"  # 16 waves of one block a worker
BLOCK = EDGE * EDGE * 8


def operands(k: int = K) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(-9, 9, (M, k)).astype("f8"), rng.integers(-9, 9, (k, N)).astype("f8")


def enough(text: str = TEXT, k: int = K) -> int:
    """Bytes of a worker that are just enough, if C is streamed."""
    a, b = operands(k)
    whole: Plan = distmm.plan(a, b, plan=text)
    return replace(whole, streamed=True, operands=("kept", "kept")).peak.worker


def left(dask_scheduler: Scheduler) -> set[str]:
    products = dask_scheduler.plugins[PlacementPlugin.name].products
    return {*products.products, *products.runs}

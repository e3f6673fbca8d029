"""Operands and plans of the tests of products that are reduced."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
from distributed import Client

# Blocks of 16 x 10 x 16 of products of 34 x 20 x 40, the last ones ragged. Waves, a split k, one worker and several.
TEXTS = {
    "one worker": "g1x1x1 b16x10x16 p1 w1 l2",
    "four workers": "g2x2x1 b16x10x16 p2 w1 l2",
    "waves": "g2x2x1 b16x10x16 p1 w2x2 l2",
    "split k": "g1x2x2 b16x10x16 p1 w1 l2",
}


def operands(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Small whole numbers, so that many elements of the product are equal, and no sum is rounded."""
    rng = np.random.default_rng(seed)
    return rng.integers(-2, 3, (34, 20)).astype("f4"), rng.integers(-2, 3, (20, 40)).astype("f4")


def best(C: np.ndarray, k: int) -> np.ndarray:
    """Columns of the k largest elements of each row, the first of equal ones first."""
    return np.argsort(-C, axis=-1, kind="stable")[..., :k]


def compute(client: Client | None, lazy: Any) -> Any:
    return dask.compute(*lazy) if client is None else client.compute(list(lazy), sync=True)

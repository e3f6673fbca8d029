"""The tasks of a tall and skinny QR: QR of blocks, and products with their factors."""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm.worker.blas_threads import shared_by


def block_qr(block: Any, tasks: int) -> tuple[Any, Any]:
    """Return Q ``(m, n)`` and R ``(n, n)`` of a block ``(m, n)``, m >= n; so many `tasks` run side by side."""
    with shared_by(tasks):
        q, r = np.linalg.qr(block)
    return q, r


def rows_times(block: Any, right: Any, tasks: int) -> Any:
    """Return the product of a block ``(m, n)`` and a small matrix ``(n, k)``; so many `tasks` run side by side."""
    with shared_by(tasks):
        return block @ right

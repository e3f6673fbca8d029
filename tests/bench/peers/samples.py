"""A check of products by elements at random: for programs whose whole C is not checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm.checking.comparison import elements
from distmm.checking.thin_products import Sums
from distmm.planning.precision import Precision
from distmm_kernels.tolerance import Tolerance

__all__ = ["sampled"]

# Rows and columns of C that are checked.
SAMPLE = (4, 64)


def sampled(a: Any, b: Any, c: Any, precision: Precision, seed: int) -> dict[str, Any]:
    """Compare elements of C at random with float64 products of rows of A and columns of B: NumPy or JAX matrices.

    Returns
    -------
    dict
        ``ok``, and ``residual``, the largest error over the bound of `distmm_kernels.tolerance`.
    """
    random = np.random.default_rng(seed)
    rows, columns = (random.integers(0, size, count) for size, count in zip(c.shape, SAMPLE, strict=True))
    parts = (a[rows], b[:, columns], c[rows][:, columns])
    tolerance = Tolerance.of(np.dtype(a.dtype), np.dtype(b.dtype), np.dtype(c.dtype), a.shape[1], precision)
    left, right, given = (np.asarray(x).astype(tolerance.work) for x in parts)
    truth = left @ right
    products = Sums(truth, abs(truth), np.zeros((1, 1), np.int32), abs(left) @ abs(right))
    _, ratio, unknown = elements(tolerance, products, given)
    residual = float(np.where(unknown, np.inf, ratio).max())
    return {"ok": residual <= 1, "residual": residual}

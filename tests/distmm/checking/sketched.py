"""Matrices of any type with their correct product, and what the test by sketches says of a product."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from distmm.checking import sketch
from distmm.planning.precision import Precision
from distmm_kernels.tolerance import Tolerance

M, K, N = 60, 300, 80


def element(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def matrices(name: str, draw: str = "normal") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and their correct product as a kernel makes it: accumulated in float32 or wider, and rounded once."""
    rng, dtype = np.random.default_rng(1), element(name)
    a, b = (rng.standard_normal(s) if draw == "normal" else rng.random(s) for s in ((M, K), (K, N)))
    if dtype.kind in "iu":
        a, b = (100 * a).astype(int), (100 * b).astype(int)
    if dtype.kind == "c":
        a, b = a + 1j * a[::-1], b - 1j * b[::-1]
    with np.errstate(invalid="ignore"):
        a, b = a.astype(dtype), b.astype(dtype)
    wide = np.float32 if dtype.itemsize <= 2 and dtype.kind not in "iu" else dtype
    return a, b, (a.astype(wide) @ b.astype(wide)).astype(dtype)


def judged(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    seed: int = 0,
    column: int = 1,
    panels: int = 3,
    precision: Precision = "highest",
    **more: Any,
) -> sketch.Judgement:
    """Sketch A and B in some panels of two block columns, and judge C as one of these columns."""
    k = a.shape[1]
    tolerance, step = Tolerance.of(a.dtype, b.dtype, c.dtype, k, precision), -(-k // panels)
    left, by = None, sketch.weigh(b[:step], tolerance.sketched)
    for p in range(0, k, step):
        panel = b[p : p + step]
        right = [sketch.of_b(panel, seed, j, tolerance.sketched, by) for j in (0, 1)]
        left = sketch.of_a(left, a[:, p : p + step], right, tolerance.sketched, seed)
    assert left is not None
    x = sketch.vectors(seed, column, c.shape[1], tolerance.exact)
    return sketch.judge(tolerance, left, column, c, x, by=by, **more)

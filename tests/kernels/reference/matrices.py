"""Shapes for tests, matrices on the GPU, and the allowed error of a product."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distmm_kernels.config import FLOAT8
from distmm_kernels.layout.float8 import carrier
from distmm_kernels.reference.matrices import strided

__all__ = ["RAGGED_SHAPES", "as_complex", "error_bound", "on_gpu"]

# (m, k, n) for a tile of 32: empty, one element, one less than a tile, one more, and long and thin in each direction
RAGGED_SHAPES = (
    (0, 5, 3),
    (5, 0, 3),
    (5, 3, 0),
    (1, 1, 1),
    (1, 33, 1),
    (31, 32, 33),
    (33, 31, 65),
    (64, 64, 64),
    (127, 1, 130),
    (3, 500, 2),
    (200, 3, 1),
    (65, 129, 97),
)


def as_complex(rows: NDArray[Any]) -> NDArray[Any]:
    """View real matrices ``(*batch, m, 2k)`` with contiguous rows as complex ones: the inverse of `as_real`."""
    return rows.view(f"c{2 * rows.itemsize}")


def on_gpu(values: NDArray[Any], order: str = "C", dtype: DTypeLike | None = None) -> Any:
    """Return the values in GPU memory, converted to ``dtype`` if given, with a layout of `strided`."""
    import cupy

    if values.dtype in FLOAT8:  # CuPy arranges their bytes
        return strided(cupy.asarray(values.view(np.uint8)), order, cupy).view(carrier(values.dtype))
    return strided(cupy.asarray(values).astype(dtype or values.dtype), order, cupy)


def error_bound(a: NDArray[Any], b: NDArray[Any], dtype: DTypeLike, c: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return the largest error that each element of ``c + a @ b`` may have in IEEE arithmetic.

    The bound is ``(k + 2) u (|A| |B| + |C|)`` with the unit roundoff u of ``dtype`` (Higham, Accuracy and Stability of
    Numerical Algorithms, section 3.5), times 2 sqrt(2) for complex numbers (section 3.6). It is 0 for integers.
    """
    dtype = np.dtype(dtype)
    magnitude = np.matmul(np.abs(a).astype(np.float64), np.abs(b).astype(np.float64))
    if dtype.kind not in "fc":
        return np.zeros_like(magnitude)
    if c is not None:
        magnitude = magnitude + np.abs(c)
    factor = 2 * np.sqrt(2) if dtype.kind == "c" else 1.0
    roundoff = float(np.finfo(dtype).eps) / 2
    return np.asarray(factor * (a.shape[-1] + 2) * roundoff * magnitude)

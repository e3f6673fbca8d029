"""Seeded matrices with any strides, shapes for tests, matrices on the GPU, and the allowed error of a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distmm_kernels.config import FLOAT8
from distmm_kernels.layout.float8 import carrier

__all__ = ["RAGGED_SHAPES", "STRIDES", "as_complex", "error_bound", "matrix", "on_gpu", "strided"]

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

# Memory layouts of a matrix. `strided` makes each of them.
STRIDES = ("C", "F", "reversed", "every other", "offset", "broadcast")


def matrix(
    shape: tuple[int, ...], dtype: DTypeLike, seed: int, distribution: str = "normal", order: str = "C"
) -> NDArray[Any]:
    """Draw a random matrix.

    Parameters
    ----------
    distribution
        ``"normal"``; ``"uniform"`` on [0, 1), which shows a bias of the rounding, since all numbers are positive; or
        ``"integers"`` from -9 to 9, exact in every type. With the first two, integer dtypes use their whole range, so
        that products wrap around.
    order
        One of ``STRIDES``.

    Raises
    ------
    ValueError
        If the distribution or order is unknown.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    values: NDArray[Any]
    if distribution == "integers":
        values = rng.integers(-9, 10, shape)
    elif distribution not in ("normal", "uniform"):
        raise ValueError(f"unknown distribution {distribution!r}: use 'normal', 'uniform' or 'integers'")
    elif dtype.kind in "iu":
        values = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    else:
        draw: Callable[..., NDArray[Any]] = rng.standard_normal if distribution == "normal" else rng.random
        values = draw(shape) + 1j * draw(shape) if dtype.kind == "c" else draw(shape)
    laid: NDArray[Any] = strided(values.astype(dtype), order)
    return laid


def strided(values: Any, order: str, xp: Any = np) -> Any:
    """Return the same matrix with the layout ``order``. All layouts but ``"broadcast"`` keep the values.

    The matrix may have any layout before. ``xp`` is the module of the array: `numpy` or `cupy`.
    """
    *batch, rows, columns = values.shape
    if order == "C":
        return xp.ascontiguousarray(values)
    if order == "F":
        return xp.ascontiguousarray(values.swapaxes(-1, -2)).swapaxes(-1, -2)
    if order == "reversed":  # negative strides
        return xp.ascontiguousarray(values[..., ::-1, ::-1])[..., ::-1, ::-1]
    if order in ("every other", "offset"):  # a view into a larger array: an odd start, and gaps between elements
        step, start = (2 if order == "every other" else 1), 3
        whole = xp.full((*batch, step * rows + start, step * columns + start), 77).astype(values.dtype)
        view = whole[..., start::step, start::step]
        view[...] = values
        return view
    if order == "broadcast":  # stride 0 along the rows
        return xp.broadcast_to(xp.ascontiguousarray(values[..., :1, :]), values.shape)
    raise ValueError(f"unknown order {order!r}: use one of {', '.join(STRIDES)}")


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

"""Matrices for tests and benchmarks: seeded distributions with any strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

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

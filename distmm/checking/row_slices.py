"""The operations of the check on one block, in slices of rows. Their memory does not grow with the block.

A check computes in float64. A whole float32 block of edge 16384 would take 2.1 GB in float64, and its squares another
2.1 GB. A worker checks several blocks at a time. This could exceed the memory of a GPU on which the product fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from distmm.checking.scaling import SPOILT, scaled, widened
from distmm.worker.gpu import namespace

__all__ = ["SLICE", "across", "down", "finite", "largest"]

# Bytes of a slice in the type of the check, for example float64. Its absolute values take as many bytes again.
SLICE = 64 << 20

Block = Any  # a NumPy or CuPy matrix


def _slices(
    block: Block, work: np.dtype[Any], rows: Block | None = None, columns: Block | None = None
) -> Iterator[tuple[slice, Block]]:
    """Yield slices of rows, and these rows in type `work`, divided by powers of two. `SPOILT` columns become zeros."""
    height = max(1, SLICE // max(1, block.shape[1] * work.itemsize))
    for first in range(0, block.shape[0], height):
        here = slice(first, first + height)
        part = block[here]
        if part.dtype.kind == "V":  # bfloat16 is the upper half of float32
            part = part.astype(np.float32)
        part = widened(part).astype(work, copy=False)
        if rows is not None and columns is not None:
            part = scaled(part, -(rows[here, None] + columns))
        elif rows is not None:
            part = scaled(part, -rows[here, None])
        elif columns is not None:
            part = scaled(part, -columns)
        yield here, part if columns is None else namespace(part).where(columns != SPOILT, part, work.type(0))


def across(
    block: Block,
    panel: Block,
    rows: Block | None,
    columns: Block | None,
    *,
    work: np.dtype[Any],
    power: Literal[0, 1, 2],
) -> Block:
    """Multiply a block by a thin panel.

    Parameters
    ----------
    block : matrix of shape (m, k)
    panel : matrix of shape (k, v)
        Of type `work`.
    rows, columns : int32 of shapes (m,) and (k,), optional
        Exponents of the powers of two that rows and columns of the block are first divided by. `SPOILT` columns count
        as zeros, although they have inf or NaN.
    power : {0, 1, 2}
        If not 0, the last column of the panel is multiplied by the absolute values of the block, or by their squares.

    Returns
    -------
    array of shape (1, m, v)
    """
    out = namespace(block).empty((1, block.shape[0], panel.shape[1]), work)
    signed = panel[:, :-1] if power else panel
    with np.errstate(invalid="ignore", over="ignore"):
        for here, part in _slices(block, work, rows, columns):
            out[0, here, : signed.shape[1]] = part @ signed
            if power:
                size = abs(part)
                if power == 2:
                    size *= size
                out[0, here, -1] = size @ panel[:, -1]
    return out


def down(block: Block, lines: Block, columns: Block | None, *, work: np.dtype[Any]) -> Block:
    """Multiply the first line by a block, and the second line, if any, by the block's absolute values.

    Parameters
    ----------
    block : matrix of shape (k, n)
    lines : matrix of shape (1, k) or (2, k)
        Of type `work`.
    columns : int32 of shape (n,), optional
        As in `across`.

    Returns
    -------
    array of shape (1, 1, n) or (1, 2, n)
    """
    out = namespace(block).zeros((1, lines.shape[0], block.shape[1]), work)
    with np.errstate(invalid="ignore", over="ignore"):
        for here, part in _slices(block, work, None, columns):
            out[0, 0] += lines[0, here] @ part
            if lines.shape[0] == 2:
                out[0, 1] += lines[1, here] @ abs(part)
    return out


def largest(block: Block, *, work: np.dtype[Any], axis: Literal[0, 1]) -> Block:
    """Return the largest absolute value of each row (axis 0) or column (axis 1) of a block. NaN counts as the largest.

    Returns
    -------
    array of float64 of shape (1, m) or (1, n)
    """
    xp = namespace(block)
    out = xp.zeros((1, block.shape[axis]), np.float64)
    for here, part in _slices(block, work) if block.size else ():
        found = abs(part).max(axis=1 - axis)
        if axis == 0:
            out[0, here] = found
        else:
            out[0] = xp.maximum(out[0], found)
    return out


def finite(block: Block, *, work: np.dtype[Any], axis: Literal[0, 1]) -> Block:
    """Return which rows (axis 0) or columns (axis 1) of a block have any finite element.

    Returns
    -------
    array of bool of shape (1, m) or (1, n)
    """
    out = namespace(block).zeros((1, block.shape[axis]), bool)
    for here, part in _slices(block, work):
        found = namespace(part).isfinite(part).any(axis=1 - axis)
        if axis == 0:
            out[0, here] = found
        else:
            out[0] |= found
    return out

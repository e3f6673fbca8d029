"""Products of a block with a few vectors: the one operation of all checks, on the device that has the block.

Floating-point numbers are multiplied in float64 or complex128, integers modulo 2**32 or 2**64. A block is converted in
pieces of rows, so the memory does not grow with the block. Only the products and some norms are copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from distmm.checking.scaling import SPOILT, Block, normalised, scaled, widened
from distmm.worker import gpu
from distmm.worker.gpu_copies import to_host

# Bytes of a piece of a block in the type of the check. It fits into the cache of the CPU, or of the GPU.
CPU_PIECE, GPU_PIECE = 2**20, 2**26


class Sums(NamedTuple):
    """Rows of a matrix times vectors. The true values, norms and sizes are these times ``2**exponents``."""

    values: np.ndarray  # (m, v)
    norms: np.ndarray  # of the rows, (m, e) for e different weights of the columns; e is 1 without weights
    exponents: np.ndarray  # int32, (m, e)
    sizes: np.ndarray  # absolute values of the rows times vectors, (m, s)

    def at(self, exponents: np.ndarray | int) -> Sums:
        """Return the same sums with other exponents."""
        shift = self.exponents - exponents
        if not shift.any():
            return self
        values, norms, sizes = (scaled(x, shift) if x.size else x for x in (self.values, self.norms, self.sizes))
        return Sums(values, norms, self.exponents - shift, sizes)


def summed(parts: Sequence[Sums]) -> Sums:
    """Add the sums of blocks that lie side by side."""
    common = np.maximum.reduce([part.exponents for part in parts])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values, norms, _, sizes = zip(*(part.at(common) for part in parts), strict=True)
        return Sums(reduce(np.add, values), np.hypot.reduce(norms), common, reduce(np.add, sizes))


def times(
    block: Block, vectors: np.ndarray, work: np.dtype, by: np.ndarray | None = None, sizes: np.ndarray | None = None
) -> Sums:
    """Multiply a block ``(m, n)`` by vectors ``(n, v)``, in the type `work`. Returns sums in host memory.

    The columns of the block are first divided by weights, whose exponents `by` ``(e, n)`` has; each of its rows is for
    v / e vectors. Columns that are `SPOILT` count as zeros. `sizes` ``(n, s)`` are vectors for the absolute values.
    """
    sizes = np.empty((block.shape[1], 0)) if sizes is None else sizes

    def all_pieces(xp: Any) -> Sums:
        v, each = vectors.shape[1], 1 if by is None else len(by)
        right, absolute = xp.asarray(vectors.astype(work)), xp.asarray(sizes)
        columns = (xp, v, work), (np, each, float), (np, each, np.int32), (xp, sizes.shape[1], float)
        out = Sums(*(where.zeros((block.shape[0], width), dtype) for where, width, dtype in columns))
        weights = [None] if by is None else [xp.asarray(row) for row in by]
        spoilt = None if by is None or not (by == SPOILT).any() else xp.asarray((by == SPOILT).any(axis=0))
        with np.errstate(over="ignore", invalid="ignore"):
            for rows, part in _pieces(xp, block, work):
                if work.kind in "iu":
                    out.values[rows] = _integers(xp, part, right)
                    continue
                for at, weight in enumerate(weights):
                    own = slice(at * v // each, (at + 1) * v // each)
                    weighted = part if weight is None else scaled(part, -weight)
                    if spoilt is not None:
                        weighted[:, spoilt] = 0
                    weighted, out.norms[rows, at], out.exponents[rows, at] = normalised(weighted)
                    out.values[rows, own] = weighted @ right[:, own]
                    if sizes.shape[1]:
                        out.sizes[rows] = abs(weighted) @ absolute
        return out

    return Sums(*computed(block, all_pieces))


def largest(block: Block, work: np.dtype) -> np.ndarray:
    """Return the largest absolute value of each column. NaN counts as the largest."""

    def all_pieces(xp: Any) -> tuple[Any]:
        sizes = (abs(part).max(axis=0) for _, part in _pieces(xp, block, work))
        return (reduce(xp.maximum, sizes, xp.zeros(block.shape[1])),)

    (found,) = computed(block, all_pieces)
    return found


def computed(block: Block, all_pieces: Callable[[Any], tuple[Any, ...]]) -> list[np.ndarray]:
    """Run a function on the device of a block, and return its arrays in host memory."""
    xp = gpu.namespace(block)
    if xp is np:
        return list(all_pieces(np))

    what = f"the check of a block, {block.shape[0]} x {block.shape[1]} {block.dtype},"
    return gpu.completed(lambda: [to_host(made) for made in all_pieces(xp)], what)


def _pieces(xp: Any, block: Block, work: np.dtype) -> Iterator[tuple[slice, Any]]:
    """Yield pieces of rows in the type of the check. They share one buffer: new memory takes longer than the sums."""
    m, k = block.shape
    step = max(1, (CPU_PIECE if xp is np else GPU_PIECE) // max(1, k * work.itemsize))
    converted = xp.empty((min(step, m), k), work)
    for i in range(0, m if k else 0, step):
        part = converted[: min(step, m - i)]
        part[...] = widened(block[i : i + step])
        yield slice(i, i + step), part


def _integers(xp: Any, part: Any, right: Any) -> Any:
    """Multiply integers. NumPy has no BLAS for them, but `einsum` sums products of two rows of 32-bit words fast."""
    if xp is np and part.dtype == np.uint32:
        return np.einsum("ik,vk->iv", part, np.ascontiguousarray(right.T))
    return part @ right

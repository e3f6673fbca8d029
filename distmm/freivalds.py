"""Freivalds' test: for random vectors X, ``A (B X)`` and ``C X`` must agree; blocked over the cluster.

Freivalds (1977). It costs O(n^2) a vector instead of O(n^3), reads each matrix once, and shares nothing with the
kernels: products of blocks with thin panels, in float64, each block in slices of rows (`distmm.slices`).

*Integers* wrap around, and so does the test: it is computed in the same two's complement ring, and the two sides must
be equal.

*Floats* must agree within `distmm.tolerance`. A row that exceeds it, or that stands out from the others, is
computed again element by element, which settles rows with inf or NaN and names the first wrong element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np

from distmm import slices
from distmm.errors import WrongResultError
from distmm.gpu import namespace
from distmm.tasks import to_device, to_host
from distmm.tolerance import Tolerance, in_type, stands_out

__all__ = ["Freivalds", "Verdict", "fetch", "values"]

# Random vectors. A wrong row escapes one vector with probability 1/2 at most, and all of them with 2**-16.
VECTORS = 16

# Rows that are computed again element by element, each at O(kn).
SUSPECTS = 16


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check.

    Attributes
    ----------
    ok : bool
    residual : float
        Largest ratio of an error to its tolerance, over rows (Freivalds) or elements (full): at most 1 if right.
    message : str
        One sentence; for a wrong C it names the first bad block, or the first bad position and both values.
    """

    ok: bool
    residual: float
    message: str

    def raise_if_wrong(self) -> None:
        """Raise `WrongResultError` with the message unless the check passed."""
        if not self.ok:
            raise WrongResultError(self.message)


def fetch(*arrays: da.Array) -> tuple[np.ndarray, ...]:
    """Compute arrays and bring them here as NumPy arrays.

    Blocks leave their GPU on the worker: a client that receives them over UCX maps the worker's memory pool, and keeps
    that memory from being freed for as long as it lives itself.
    """
    on_host = (x.map_blocks(to_host, dtype=x.dtype, meta=np.empty((0,) * x.ndim, x.dtype)) for x in arrays)
    return tuple(dask.compute(*on_host))


@dataclass(frozen=True)
class Freivalds:
    """The test with random vectors, of blocked matrices.

    `rows` and `columns`, where given, are those of C that count, as bools.
    """

    a: da.Array
    b: da.Array
    c: da.Array
    tolerance: Tolerance
    on_gpu: bool
    alpha: complex = 1
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    def run(self, seed: int) -> Verdict:
        """Test all rows at once, then look at those that fail or stand out."""
        left, right, spread, size = self._both_sides(seed)
        with np.errstate(invalid="ignore", over="ignore"):
            if self.tolerance.exact:
                ratio = self.tolerance.differ(left, right) * np.inf
            else:
                ratio = self.tolerance.ratio(left, right, spread, size, terms=self.c.shape[1])
                # Two sums that are both inf or NaN say nothing about their other terms.
                ratio[~np.isfinite(left) | ~np.isfinite(right)] = np.inf
        if self.rows is not None:
            ratio[~self.rows] = 0
        rows = np.nan_to_num(ratio, nan=0.0, posinf=np.inf).max(axis=1, initial=0.0)
        suspects = np.flatnonzero(stands_out(rows))
        for row in sorted(suspects, key=lambda row: -rows[row])[:SUSPECTS]:
            message = self._first_bad_block(int(row))
            if message:
                return Verdict(False, float(rows[row]), f"C is not A @ B: row {row} stands out; {message}")
        if np.count_nonzero(rows > 1) > SUSPECTS:
            return self._without_non_finite(seed)
        residual = float(rows[rows <= 1].max(initial=0.0))
        return Verdict(True, residual, f"C agrees with A @ B on {VECTORS} random vectors")

    def _both_sides(self, seed: int) -> tuple[np.ndarray, ...]:
        """Return ``alpha A (B X)``, ``C X``, and of each row the bound on |A||B| and the size of C.

        A thin panel has a column more than X: ones, with which the squares of a row are summed on the way.
        """
        rng, work, exact = np.random.default_rng(seed), self.tolerance.work, self.tolerance.exact
        shape = (self.b.shape[1], VECTORS)
        # Modulo 2**w an error may be a multiple of a power of two, which signs would miss: any residue, instead.
        x = rng.integers(0, 2**64, shape, dtype=np.uint64) if exact else rng.choice(np.array([-1.0, 1.0]), shape)
        x = x if exact else np.hstack([x, np.ones((shape[0], 1))]).astype(work)
        y = self._across(self.b, x, self.columns, 0 if exact else 2)
        if not exact:
            y = y.map_blocks(_rooted, dtype=work, meta=y._meta)
        left, right = fetch(
            self._across(self.a, y.rechunk((self.a.chunks[1], y.shape[1])), None, 0 if exact else 1),
            self._across(self.c, x, self.columns, 0 if exact else 2),
        )
        alpha = in_type(self.alpha, work)
        if exact:
            return left * alpha, right, np.empty(0), np.empty(0)
        with np.errstate(invalid="ignore", over="ignore"):
            spread, size = np.abs(alpha) * left[:, -1:].real, np.sqrt(right[:, -1:].real)
            return left[:, :-1] * alpha, right[:, :-1], spread, size

    def _across(self, matrix: da.Array, panel: Any, columns: np.ndarray | None, power: Literal[0, 1, 2]) -> da.Array:
        """Multiply a matrix by a thin panel, block by block where the blocks are."""
        work, width = self.tolerance.work, panel.shape[1]
        panel = panel if isinstance(panel, da.Array) else self._beside(panel, (matrix.chunks[1], width))
        function = partial(slices.across, work=work, power=power)
        return _summed(function, "jiv", matrix, panel, "jv", *self._kept(columns, matrix), dtype=work)

    def _kept(self, columns: np.ndarray | None, matrix: da.Array) -> tuple[Any, Any]:
        """Return which columns of a matrix count, as an argument with its index."""
        return (None, None) if columns is None else (self._beside(columns, (matrix.chunks[1],)), "j")

    def _beside(self, values: np.ndarray, chunks: tuple[Any, ...]) -> da.Array:
        """Return `values` cut into blocks, which are where those of the matrices are."""
        blocks = da.from_array(values, chunks=chunks)
        return blocks.map_blocks(to_device, dtype=values.dtype, meta=blocks._meta) if self.on_gpu else blocks

    def _first_bad_block(self, row: int) -> str | None:
        """Recompute one row, O(kn), to name the first bad block and element; None if every element is right."""
        work, exact = self.tolerance.work, self.tolerance.exact
        line, given = (x.astype(work) for x in fetch(self.a[row], self.c[row]))
        lines = line[None] if exact else np.stack([line, abs(line)])
        panel, kept = self._beside(lines, (len(lines), self.b.chunks[0])), self._kept(self.columns, self.b)
        (found,) = fetch(_summed(partial(slices.down, work=work), "ivj", self.b, panel, "vi", *kept, dtype=work))
        if self.columns is not None:
            given = np.where(self.columns, given, 0)
        alpha = in_type(self.alpha, work)
        with np.errstate(invalid="ignore", over="ignore"):
            truth = found[0] * alpha
            if exact:
                bad = self.tolerance.differ(truth, given)
            else:
                bad = self.tolerance.ratio(truth, given, found[1].real * np.abs(alpha), np.abs(truth)) > 1
        if not bad.any():
            return None
        column = int(np.argmax(bad))
        i, j = (
            int(np.searchsorted(np.cumsum(self.c.chunks[d]), at, side="right")) for d, at in ((0, row), (1, column))
        )
        both = values(given[column], truth[column], self.tolerance.dtype)
        return f"first bad block C[{i}, {j}], at [{row}, {column}] {both}"

    def _without_non_finite(self, seed: int) -> Verdict:
        """Settle rows of A and columns of B with inf or NaN, which spoil every random vector, then test the rest.

        Every element of C in such a row or column has an infinite or undefined term, so none may be finite.
        """
        spoilt = fetch(self._flags(self.a, 0, finite=False), self._flags(self.b, 1, finite=False))
        kept: list[np.ndarray] = []
        sides: tuple[tuple[Literal[0, 1], str, str], ...] = ((0, "row", "A"), (1, "column", "B"))
        for (axis, word, source), bad, before in zip(sides, spoilt, (self.rows, self.columns), strict=True):
            at = np.flatnonzero(bad if before is None else bad & before)
            (wrong,) = fetch(self._flags(self.c, axis, finite=True))
            if wrong[at].any():
                line = f"{word} {at[np.argmax(wrong[at])]}"
                message = f"C is not A @ B: {line} holds finite values, but {source} has inf or NaN there"
                return Verdict(False, math.inf, message)
            kept.append(~bad)
        if self.rows is not None or all(each.all() for each in kept):
            message = (
                f"C overflowed in more than {SUSPECTS} rows; the first are right: scale A or B, or use check='full'"
            )
            return Verdict(False, math.inf, message)
        return replace(self, rows=kept[0], columns=kept[1]).run(seed)

    def _flags(self, matrix: da.Array, axis: Literal[0, 1], finite: bool) -> da.Array:
        """Which rows or columns of a matrix have any finite element, or any that is not."""
        function = partial(slices.flags, work=self.tolerance.work, axis=axis, finite=finite)
        return _summed(function, "ji" if axis == 0 else "ij", matrix, dtype=np.dtype(bool)).astype(bool)


def _summed(function: Any, indices: str, matrix: da.Array, *others: Any, dtype: np.dtype) -> da.Array:
    """Apply a function to each block of a matrix ``ij``, and sum what it returns over the first of these indices."""
    meta = namespace(matrix._meta).empty((0,) * len(indices), dtype)
    once = {indices[0]: 1}
    blocks = da.blockwise(function, indices, matrix, "ij", *others, adjust_chunks=once, dtype=dtype, meta=meta)
    return blocks.sum(axis=0, dtype=None if dtype.kind == "b" else dtype)


def _rooted(panel: Any) -> Any:
    """Return a panel with the roots of its last column."""
    panel = panel.copy()
    panel[:, -1] **= 0.5
    return panel


def values(given: Any, truth: Any, dtype: np.dtype) -> str:
    """Say which value is there and which should be."""
    with np.errstate(over="ignore"):
        return f"C has {np.asarray(given).astype(dtype)}, the product is {np.asarray(truth).astype(dtype)}"

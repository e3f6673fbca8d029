"""Freivalds' test of a whole product, block by block: for random vectors X, ``A (B X)`` and ``C X`` must agree.

Freivalds (1977). The test takes O(n^2) operations for each vector instead of O(n^3), and reads each matrix once. It
shares no code with the kernels: it multiplies blocks by thin panels in float64, in slices of rows
(`distmm.checking.row_slices`).

*Integers* wrap around. The test computes in the same two's complement arithmetic, and both sides must be equal.

*Floating-point numbers* must agree within `distmm.checking.tolerance`. A row that exceeds it, or is far above the other
rows, is computed again element by element. This decides rows with inf or NaN, and finds the first wrong element. If the
columns of B differ much in size, or sums of squares would leave float64's range, a second test multiplies the rows of A
and the columns of B by powers of two (`distmm.checking.scaling`). Each matrix is then read twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array

from distmm.checking import row_slices, sampled_elements, sampled_sums
from distmm.checking.scaling import EMPTY, SPOILT, exponents, extreme, graded, scaled, weights
from distmm.checking.tolerance import Tolerance, in_type, mantissa, stands_out
from distmm.checking.verdict import Verdict
from distmm.worker.gpu import namespace, retrying
from distmm.worker.tasks import to_device, to_host

__all__ = ["OVERFLOW", "Freivalds", "fetch", "values"]

# Number of random vectors. One vector misses a wrong row with a probability of at most 1/2, and all with 2**-16.
VECTORS = 16

# Number of rows that are computed again element by element. Each takes O(kn).
SUSPECTS = 16

OVERFLOW = "a sum on the way to it may overflow or not, by the order of its terms: scale A or B"


@dataclass(frozen=True)
class Scales:
    """Exponents of the largest elements of A's rows and B's columns, and of the divisors of C's rows and columns.

    The divisors are no smaller than the error by underflow, which would otherwise hide all columns of a row.
    """

    rows: np.ndarray
    columns: np.ndarray
    c_rows: np.ndarray
    c_columns: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, columns: np.ndarray, tolerance: Tolerance, alpha: complex) -> Scales:
        """Choose the scales for the exponents of A's rows and B's columns."""
        product = np.where((rows == EMPTY) | (rows == SPOILT), EMPTY, rows + mantissa(alpha)[1])
        least = math.frexp(tolerance.underflow(alpha))[1] - int(product.max(initial=EMPTY))
        by = weights(columns, least)
        underflow = tolerance.underflow(alpha, by[by != SPOILT])
        return cls(rows, columns, np.maximum(product, math.frexp(underflow)[1]).astype(np.int32), by.astype(np.int32))

    @property
    def spoilt(self) -> bool:
        """Whether any row of A or column of B has inf or NaN."""
        return bool((self.rows == SPOILT).any() or (self.columns == SPOILT).any())


def fetch(*arrays: da.Array) -> tuple[np.ndarray, ...]:
    """Compute arrays and return them as NumPy arrays.

    Workers copy GPU blocks to host memory first. A client that receives GPU blocks over UCX maps the worker's memory
    pool, which then cannot be freed until the client exits.
    """
    on_host = (x.map_blocks(to_host, dtype=x.dtype, meta=np.empty((0,) * x.ndim, x.dtype)) for x in arrays)
    return tuple(dask.compute(*on_host))


@dataclass(frozen=True)
class Freivalds:
    """Freivalds' test of blocked matrices.

    Attributes
    ----------
    a, b, c : dask.array.Array of shapes (m, k), (k, n) and (m, n)
    tolerance : Tolerance
    on_gpu : bool
        Whether the blocks are in GPU memory.
    alpha : scalar
    """

    a: da.Array
    b: da.Array
    c: da.Array
    tolerance: Tolerance
    on_gpu: bool
    alpha: complex = 1

    def run(self, seed: int) -> Verdict:
        """Test all rows, then compute the rows again that fail or are outliers."""
        if self.tolerance.exact:
            left, right = self._both_sides(seed, None)
            return self._verdict(np.where(self.tolerance.differ(left, right), np.inf, 0.0), None)
        more = self._largest(self.a, 0), self._largest(self.b, 1), *self._samples(seed)
        left, right, rows, columns, *samples = self._both_sides(seed, None, *more)
        verdict = self._by_rows(seed, left, right, rows, columns)
        message = self._rounding(seed, *samples) if samples and verdict.outcome != "wrong" else None
        return Verdict("wrong", math.inf, f"C is not A @ B: {message}") if message else verdict

    def _by_rows(
        self, seed: int, left: np.ndarray, right: np.ndarray, rows: np.ndarray, columns: np.ndarray
    ) -> Verdict:
        """Compare both sides of floats. If that is not conclusive, compare again with scaled rows and columns."""
        scales = Scales.of(exponents(rows), exponents(columns), self.tolerance, self.alpha)
        far = any(map(extreme, (scales.rows, scales.columns, np.array([mantissa(self.alpha)[1]]))))
        if not far:
            underflow = self.tolerance.underflow(self.alpha, np.zeros(len(columns), np.int32))
            verdict = self._verdict(self._ratio(left, right, underflow), scales)
            if verdict.outcome == "wrong" or not graded(scales.columns):
                return verdict
        if scales.spoilt:
            message = self._finite_where_spoilt(scales)
            if message:
                return Verdict("wrong", math.inf, f"C is not A @ B: {message}")
        ratio = self._scaled_ratio(self._both_sides(seed, scales), scales)
        ratio[scales.rows == SPOILT] = 0
        return self._verdict(ratio, scales)

    def _samples(self, seed: int) -> tuple[da.Array, ...]:
        """Return sampled rows of A and columns of B, and the elements of C in these rows and columns."""
        if not self.tolerance.narrow:
            return ()
        at = [sampled_sums.positions(size, seed, axis) for axis, size in enumerate(self.c.shape)]
        return self.a[at[0]], self.b[:, at[1]], self.c[at[0]][:, at[1]]

    def _rounding(self, seed: int, rows: np.ndarray, columns: np.ndarray, given: np.ndarray) -> str | None:
        """Return a message if the errors of the sampled elements are larger than the precision allows."""
        some = sampled_sums.Columns(np.arange(columns.shape[1]), columns)
        sample = sampled_sums.sampled(None, rows, [some])
        if sample is None:
            return None
        level, row = sampled_elements.level(self.tolerance, sample, 0, given, self.alpha)
        if level <= 1:
            return None
        row = int(sampled_sums.positions(self.c.shape[0], seed, 0)[row])
        what = (
            f"the errors of {given.size} sampled elements are {level:.2g} times what rounding causes at this precision"
        )
        return f"{what}, and largest in row {row}"

    def _verdict(self, ratio: np.ndarray, scales: Scales | None) -> Verdict:
        """Decide the rows that fail or are outliers by their elements, and return the verdict."""
        rows = ratio.max(axis=1, initial=0.0)
        residual, unknown = float(rows[rows <= 1].max(initial=0.0)), None
        suspects, dependence = np.flatnonzero(stands_out(rows)), 1.0
        for row in sorted(suspects, key=lambda row: -rows[row])[:SUSPECTS]:
            outcome, where, own = self._elements(int(row), scales)
            if outcome == "wrong":
                return Verdict("wrong", float(rows[row]), f"C is not A @ B: row {row} stands out; {where}")
            unknown, dependence = unknown or where, max(dependence, own)
        if unknown:
            return Verdict("cannot tell", residual, f"C may be A @ B or not: {unknown}")
        if np.count_nonzero(rows > dependence) > SUSPECTS:
            message = (
                f"C may be A @ B or not: more than {SUSPECTS} rows have inf or NaN, or sums that float64 cannot "
                f"compare, and only the first {SUSPECTS} were checked, which are right: scale A or B, or use "
                "check='full'"
            )
            return Verdict("cannot tell", residual, message)
        return Verdict("right", residual, f"C agrees with A @ B on {VECTORS} random vectors")

    def _both_sides(self, seed: int, scales: Scales | None, *more: da.Array) -> tuple[np.ndarray, ...]:
        """Return ``A (B X)`` and ``C X``, and the results of `more`, computed in the same pass over the blocks.

        For floats X has one more column, of ones. In the same pass it sums the squares of each row. The last column of
        the results is therefore a bound on the norm of |A||B|, and the square of the norm of C.
        """
        rng, work, exact = np.random.default_rng(seed), self.tolerance.work, self.tolerance.exact
        shape = (self.b.shape[1], VECTORS)
        # Errors of integers may be multiples of a power of two, which vectors of +-1 would miss.
        x = rng.integers(0, 2**64, shape, dtype=np.uint64) if exact else rng.choice(np.array([-1.0, 1.0]), shape)
        x = x if exact else np.hstack([x, np.ones((shape[0], 1))]).astype(work)
        rows, by_rows, by_columns = (None,) * 3 if scales is None else (scales.rows, scales.c_rows, scales.c_columns)
        y = self._across(self.b, x, None, by_columns, 0 if exact else 2)
        if not exact:
            y = y.map_blocks(_rooted, dtype=work, meta=y)
        left, right, *found = fetch(
            self._across(self.a, y.rechunk((self.a.chunks[1], y.shape[1])), rows, None, 0 if exact else 1),
            self._across(self.c, x, by_rows, by_columns, 0 if exact else 2),
            *more,
        )
        return left * in_type(self.alpha if exact or scales is None else mantissa(self.alpha)[0], work), right, *found

    def _ratio(self, left: np.ndarray, right: np.ndarray, underflow: np.ndarray | float) -> np.ndarray:
        """Return the error over the tolerance of each row and vector. Infinity if a sum is not finite."""
        with np.errstate(invalid="ignore", over="ignore"):
            spread, size = np.abs(left[:, -1:]), np.sqrt(right[:, -1:].real)
            limit = self.tolerance.limit(spread, size, underflow, self.c.shape[1])
            return self.tolerance.ratio(left[:, :-1], right[:, :-1], limit)

    def _scaled_ratio(self, sides: tuple[np.ndarray, ...], scales: Scales) -> np.ndarray:
        """As `_ratio`, for sides that were computed with `scales`."""
        left, right = sides
        rows = np.where(scales.rows == SPOILT, EMPTY, scales.rows) + mantissa(self.alpha)[1] - scales.c_rows
        underflow = self.tolerance.underflow(self.alpha, scales.c_columns[scales.c_columns != SPOILT])
        return self._ratio(scaled(left, rows[:, None]), right, np.ldexp(underflow, -scales.c_rows)[:, None])

    def _across(
        self, matrix: da.Array, panel: Any, rows: np.ndarray | None, columns: np.ndarray | None, power: Literal[0, 1, 2]
    ) -> da.Array:
        """Multiply a matrix by a thin panel, block by block, on the workers that have the blocks."""
        work, width = self.tolerance.work, panel.shape[1]
        panel = panel if isinstance(panel, da.Array) else self._in_blocks(panel, (matrix.chunks[1], width))
        function = partial(row_slices.across, work=work, power=power)
        scales = *self._scale(rows, matrix, 0), *self._scale(columns, matrix, 1)
        return _summed(function, "jiv", matrix, panel, "jv", *scales, dtype=work)

    def _scale(self, values: np.ndarray | None, matrix: da.Array, axis: Literal[0, 1]) -> tuple[Any, Any]:
        """Return the exponents of a matrix's rows or columns, and their index, as arguments of `da.blockwise`."""
        return (None, None) if values is None else (self._in_blocks(values, (matrix.chunks[axis],)), "ij"[axis])

    def _in_blocks(self, values: np.ndarray, chunks: tuple[Any, ...]) -> da.Array:
        """Return `values` as a Dask array, with blocks in GPU memory if the matrices' blocks are there."""
        blocks = da.from_array(values, chunks=chunks)
        return blocks.map_blocks(to_device, dtype=values.dtype, meta=blocks) if self.on_gpu else blocks

    def _elements(self, row: int, scales: Scales | None) -> tuple[str, str | None, float]:
        """Compute one row again, in O(kn). Return the outcome, a text on its first bad element, and the dependence."""
        work, alpha, dependence = self.tolerance.work, self.alpha, 1.0
        line, given = (x.astype(work) for x in fetch(self.a[row], self.c[row]))
        if scales is None:
            truth = self._down(line[None], None)[0] * in_type(alpha, work)
            bad, unknown = self.tolerance.differ(truth, given), np.zeros(len(given), bool)
        else:
            whole, own = line, max(0 if scales.rows[row] == SPOILT else int(scales.rows[row]), -2000)
            columns = weights(scales.columns)
            factor, exponent = mantissa(alpha)
            line = scaled(line, -own)
            truth, spread = self._down(np.stack([line, abs(line)]), columns) * in_type(factor, work)
            counts = columns != SPOILT
            shift = own + exponent + np.where(counts, columns, 0)
            given = np.where(counts, given, 0)
            compare = partial(self.tolerance.elements, truth, given, abs(spread), shift, alpha)
            ratio, unknown = compare()
            if (ratio > 1).any():
                dependence = self._dependence(whole, ratio)
                ratio, unknown = compare(dependence)
            bad = ratio > 1
            with np.errstate(over="ignore", invalid="ignore"):
                truth = scaled(truth, shift)
        for outcome, found in (("wrong", bad), ("cannot tell", unknown)):
            if found.any():
                return outcome, self._named(row, int(np.argmax(found)), given, truth, outcome), dependence
        return "right", None, dependence

    def _dependence(self, line: np.ndarray, ratio: np.ndarray) -> float:
        """Return the dependence of the roundings (`sampled_elements.dependence`) of the worst elements of a row."""
        worst = np.sort(np.argsort(-ratio, kind="stable")[: sampled_sums.EDGE])
        (found,) = fetch(self.b[:, worst])
        columns = sampled_sums.Columns(worst, found)
        rows = np.repeat(line[None], sampled_sums.EDGE, axis=0)
        sample = sampled_sums.sampled(None, rows.astype(self.a.dtype), [columns])
        return 1.0 if sample is None else sampled_elements.dependence(sample, 0)

    def _down(self, lines: np.ndarray, columns: np.ndarray | None) -> np.ndarray:
        """Multiply the first line by B, and the second line, if any, by its absolute values."""
        work, panel = self.tolerance.work, self._in_blocks(lines, (len(lines), self.b.chunks[0]))
        scale = self._scale(columns, self.b, 1)
        function = partial(row_slices.down, work=work)
        (found,) = fetch(_summed(function, "ivj", self.b, panel, "vi", *scale, dtype=work))
        return np.asarray(found)

    def _named(self, row: int, column: int, given: np.ndarray, truth: np.ndarray, outcome: str) -> str:
        """Return a text with the position of an element, its block, its value and its right value."""
        i, j = (
            int(np.searchsorted(np.cumsum(self.c.chunks[d]), at, side="right")) for d, at in ((0, row), (1, column))
        )
        both = values(given[column], truth[column], self.tolerance.dtype)
        if outcome == "wrong":
            return f"first bad block C[{i}, {j}], at [{row}, {column}] {both}"
        return f"at [{row}, {column}] {both}, and {OVERFLOW}"

    def _finite_where_spoilt(self, scales: Scales) -> str | None:
        """Return a message if C is finite in a row or column that must be inf or NaN.

        Rows of A and columns of B with inf or NaN make every product with a random vector inf or NaN, so the test
        leaves them out. Every element of C in such a row or column has an infinite or undefined term, so none may be
        finite.
        """
        sides: tuple[tuple[Literal[0, 1], str, str], ...] = ((0, "row", "A"), (1, "column", "B"))
        for (axis, word, source), found in zip(sides, (scales.rows, scales.columns), strict=True):
            spoilt = np.flatnonzero(found == SPOILT)
            if not spoilt.size:
                continue
            function = partial(row_slices.finite, work=self.tolerance.work, axis=axis)
            (wrong,) = fetch(_by_block(function, "ji" if axis == 0 else "ij", self.c, dtype=np.dtype(bool)).any(axis=0))
            if wrong[spoilt].any():
                line = int(spoilt[np.argmax(wrong[spoilt])])
                (given,) = fetch(self.c[line] if axis == 0 else self.c[:, line])
                other = int(np.argmax(np.isfinite(given.astype(self.tolerance.work))))
                at = (line, other) if axis == 0 else (other, line)
                return f"at {list(at)} C has {given[other]}, but {word} {line} of {source} has inf or NaN"
        return None

    def _largest(self, matrix: da.Array, axis: Literal[0, 1]) -> da.Array:
        """Return the largest absolute value of each row or column."""
        function = partial(row_slices.largest, work=self.tolerance.work, axis=axis)
        return _by_block(function, "ji" if axis == 0 else "ij", matrix, dtype=np.dtype(np.float64)).max(axis=0)


def _by_block(function: Any, indices: str, matrix: da.Array, *others: Any, dtype: np.dtype) -> da.Array:
    """Apply a function to each block of a matrix ``ij``. Each result has length 1 along the first of `indices`."""
    meta = namespace(meta_from_array(matrix)).empty((0,) * len(indices), dtype)
    once = {indices[0]: 1}
    return da.blockwise(
        partial(_retried, function), indices, matrix, "ij", *others, adjust_chunks=once, dtype=dtype, meta=meta
    )


def _retried(function: Any, block: Any, *others: Any) -> Any:
    """Apply a function to a block. On a GPU whose memory is full, try again (`distmm.worker.gpu.retrying`)."""
    work = partial(function, block, *others)
    if namespace(block) is np:
        return work()
    return retrying(work, f"the check of a block, {block.shape[0]} x {block.shape[1]} {block.dtype},")


def _summed(function: Any, indices: str, matrix: da.Array, *others: Any, dtype: np.dtype) -> da.Array:
    """Sum the results of a function for each block of a matrix over the first of `indices`."""
    return _by_block(function, indices, matrix, *others, dtype=dtype).sum(axis=0, dtype=dtype)


def _rooted(panel: Any) -> Any:
    """Return a panel with the square roots of its last column."""
    panel = panel.copy()
    panel[:, -1] **= 0.5
    return panel


def values(given: Any, truth: Any, dtype: np.dtype) -> str:
    """Return a text with the value of C and the value of the product."""
    with np.errstate(over="ignore"):
        return f"C has {np.asarray(given).astype(dtype)}, the product is {np.asarray(truth).astype(dtype)}"

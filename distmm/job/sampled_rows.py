"""Compares random rows of a reduced product with A and all of B.

Each sampled row is computed again over all columns, in float64 (integers: exactly), without the kernels and without the
reduction of the job. The values in the result must be equal within the tolerance for rounding. No column that the
result omits may belong into it by more than that tolerance. A fault in a sampled row is detected. A fault in many rows
is probably detected, because one of them is sampled. A fault in a few rows is probably missed.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import dask
import numpy as np
from distributed import Client

from distmm.checking.thin_products import Sums, summed, times
from distmm.checking.verdict import Verdict, of_tolerance
from distmm.job.folder import Json
from distmm.job.reduction import Reduction, TopK
from distmm.job.spec import Spec
from distmm.product.operand import Operand
from distmm.storage.matrix import Matrix
from distmm_kernels.tolerance import SIGMAS, Tolerance

# Number of sampled rows. A fault in one of ten rows is missed once in thirty times. More rows take more arithmetic, but
# little more time, because most of the time is spent on reading B.
ROWS = 32

# Columns of B in a task, at least and at most. They are whole chunks, so that each chunk is read once. Without chunks,
# a row is read in pieces of 64 kB. Wider chunks are divided, because a task has five arrays of 32 rows.
COLUMNS = 1 << 13, 1 << 17

# Bytes of B, in the type of the check, that a task reads at a time, or one chunk.
PIECE = 64 << 20


class Found(NamedTuple):
    """The worst error that a task found in some columns.

    Attributes
    ----------
    ratio : float
        Largest error divided by its limit.
    message : str
        Description of the error, for a ratio above 1.
    unknown : int
        Number of elements that cannot be compared: inf or NaN.
    """

    ratio: float
    message: str
    unknown: int


@dataclass(frozen=True)
class _Columns:
    """Compares sampled rows with the product over some columns. Runs on workers.

    Attributes
    ----------
    rows : tuple of int
    left : array of shape (r, k)
        The sampled rows of A, in the type of the check.
    given : tuple of pairs of arrays
        The columns and values in the result, for each sampled row.
    b : Operand
    reduction : Reduction
    tolerance : Tolerance
    """

    rows: tuple[int, ...]
    left: np.ndarray
    given: tuple[tuple[np.ndarray, np.ndarray], ...]
    b: Operand
    reduction: Reduction
    tolerance: Tolerance

    def __call__(self, columns: slice) -> Found:
        with np.errstate(all="ignore"):
            truth, limit = self.elements(columns)
            # What the result says of each element: its value, or that it is not better than the last one.
            given, off, listed = (np.zeros(truth.shape, dtype) for dtype in (float, bool, bool))
            for at, (own, values) in enumerate(self.given):
                inside = (own >= columns.start) & (own < columns.stop)
                here, scores, least = own[inside] - columns.start, self._scores(values), self._least(values)
                belongs = np.greater if isinstance(self.reduction, TopK) else np.greater_equal
                given[at], off[at] = least, belongs(truth[at], least)
                given[at, here], off[at, here] = scores[inside], truth[at, here] != scores[inside]
                listed[at, here] = True
            known = np.isfinite(truth) & np.isfinite(given)
            if self.tolerance.exact:
                ratio = np.where(off, np.inf, 0.0)
            else:
                error = np.where(known & off & np.isfinite(limit), np.abs(truth - given), 0.0)
                ratio = np.where(error == 0, 0.0, error / np.maximum(limit, np.finfo(float).tiny))
                known &= np.isfinite(limit)
        line, column = map(int, np.unravel_index(int(np.argmax(ratio)), ratio.shape))
        row, name = self.rows[line], columns.start + column
        message = f"row {row} leaves out column {name}, which should be in it"
        if listed[line, column]:
            own, values = self.given[line]
            message = f"row {row} has {values[own == name][0]} for column {name}, which is not the value of C"
        return Found(float(ratio[line, column]), message, int(np.count_nonzero(~known)))

    def elements(self, columns: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the score of each element, by which larger is better, and the largest error of a right score."""
        truth, spread, of_columns = self.sums(columns)
        tolerance = self.tolerance
        if tolerance.exact:
            return truth.astype(tolerance.dtype), np.zeros(truth.shape)
        limit = tolerance.limit(spread, np.abs(truth), tolerance.underflow(1))
        metric = self.reduction.metric
        of_rows = (self.left**2).sum(axis=1)
        if metric == "cosine":
            lengths = np.outer(_lengths(of_rows), _lengths(of_columns))
            # Both norms, and both divisions by them, are rounded.
            truth, limit = truth / lengths, limit / lengths
            limit = limit + SIGMAS * 4 * tolerance.u_out * np.abs(truth)
        elif metric == "euclidean":
            squares = of_rows[:, None] + of_columns
            # The score is minus the squared distance, so that the nearest is the largest. It is rounded to C's type.
            truth, limit = 2 * truth - squares, 2 * limit + SIGMAS * 4 * tolerance.u_out * squares
        return truth, limit

    def sums(self, columns: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return A @ B for the sampled rows and these columns, |A| @ |B|, and the squared norms of the columns of B."""
        work = self.tolerance.work
        few = max(1, PIECE // ((columns.stop - columns.start) * work.itemsize))
        found: list[Sums] = []
        for panel in _cut(self.b.shape[0], (self.b.storage_chunk or (1, 1))[0], few) or [slice(0, 0)]:
            rows = self.left[:, panel].T
            found = [summed([*found, times(self.b.region(panel, columns).T, rows, work, sizes=abs(rows))])]
        truth, norms, _, spread = found[0].at(0)
        return truth.T, spread.T, norms[:, 0] ** 2

    def _scores(self, values: np.ndarray) -> np.ndarray:
        """Return the scores (`elements`) of values in the result."""
        if self.tolerance.exact:
            return values
        wide = values.astype(np.float64)
        return -(wide**2) if self.reduction.metric == "euclidean" else wide

    def _least(self, values: np.ndarray) -> Any:
        """Return the score that omitted columns of a row must not exceed, or not reach."""
        if isinstance(self.reduction, TopK):
            return self._scores(values[-1:])[0]
        t = self.reduction.t
        return -t * t if self.reduction.metric == "euclidean" else t


def _lengths(squares: np.ndarray) -> np.ndarray:
    """Return the norms to divide by. 1 for zero vectors, whose cosine with all others is 0."""
    return np.where(squares == 0, 1.0, np.sqrt(squares))


def check_sample(client: Client | None, spec: Spec, path: str, content: Json, seed: int) -> Verdict:
    """Compare random rows of a reduced product with A and all of B, which is read once.

    Parameters
    ----------
    client : distributed.Client or None
        Its workers read B. None: this process reads B. If B is an array of this process, this process also reads it.
    spec : Spec
    path : str
        Path of the result, or of its draft.
    content : dict
        The certificate, or its entries ``"done"`` (markers of the block rows) and ``"blocks"``.
    seed : int
        Seed of the choice of rows.

    Returns
    -------
    Verdict
    """
    (m, k), n = spec.a.shape, spec.b.shape[1]
    assert spec.reduction is not None
    chosen = np.sort(np.random.default_rng(seed).choice(m, min(m, ROWS), replace=False))
    if not chosen.size:
        return Verdict("right", 0.0, "the product has no rows")
    tolerance = Tolerance.of(spec.a.dtype, spec.b.dtype, spec.dtype, k, spec.choices.precision)
    given, problem = _given(spec, path, content, chosen, n)
    if problem is not None:
        return Verdict("wrong", math.inf, problem)
    left = np.concatenate([spec.a.region(slice(row, row + 1), slice(0, k)) for row in chosen.tolist()])
    check = _Columns(tuple(chosen.tolist()), left.astype(tolerance.work), given, spec.b, spec.reduction, tolerance)
    width = (spec.b.storage_chunk or (1, 1))[1]
    regions = _cut(n, min(width, COLUMNS[1]), COLUMNS[0])
    if client is None or not isinstance(spec.b.source, Matrix):
        found = [check(region) for region in regions]
    else:
        # The rows of A are sent once. They may exceed the size from which Dask warns of large graphs.
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TB"}):
            sent = client.submit(lambda: check, pure=False)
        found = client.gather(client.map(operator.call, [sent] * len(regions), regions, pure=False, batch_size=1000))
    worst, unknown = max(found, default=Found(0.0, "", 0)), sum(one.unknown for one in found)
    about = f"{len(chosen)} of {m} rows, chosen at random and computed again over all columns"
    if worst.ratio > 1:
        return Verdict("wrong", worst.ratio, f"the result is not that of A and B: among {about}, {worst.message}")
    if unknown:
        what = f"{unknown} elements of {about}, are inf or NaN and cannot be compared; the others are right"
        return Verdict("cannot tell", worst.ratio, what)
    return Verdict("right", worst.ratio, f"{about}, are right, the largest error is {of_tolerance(worst.ratio)}")


def _cut(size: int, chunk: int, least: int) -> list[slice]:
    """Cut rows or columns into parts of whole chunks, of at most `least` rows or columns, but at least one chunk."""
    edge = max(1, chunk) * max(1, least // max(1, chunk))
    return [slice(start, min(size, start + edge)) for start in range(0, size, edge)]


def _given(
    spec: Spec, path: str, content: Json, chosen: np.ndarray, n: int
) -> tuple[tuple[tuple[np.ndarray, np.ndarray], ...], str | None]:
    """Return columns and values of the sampled rows in the result, and a message if they are invalid (`_misformed`)."""
    assert spec.reduction is not None
    units, given = spec.contents.complete(path, content), []
    assert units is not None, f"{path} was just written, or compared with its certificate"
    markers = {marker["i"]: marker for marker in content["done"]}
    height, problem = content["blocks"][0], None
    for i, rows in itertools.groupby(chosen.tolist(), lambda row: row // height):  # `chosen` is sorted
        arrays = {name: units.read(markers[i], name) for name in markers[i]["sums"]}
        for row in rows:
            if isinstance(spec.reduction, TopK):
                own, values = (arrays[name][row - i * height] for name in ("indices", "values"))
            else:
                at = slice(*np.searchsorted(arrays["rows"], [row, row + 1]).tolist())
                own, values = arrays["columns"][at], arrays["values"][at]
            problem = problem or _misformed(row, own, values, n, spec.reduction)
            given.append((own, values))
    return tuple(given), problem


def _misformed(row: int, own: np.ndarray, values: np.ndarray, n: int, reduction: Reduction) -> str | None:
    """Return a message for a row that is wrong for any A and B. None if it is valid."""
    if own.size and not 0 <= own.min() <= own.max() < n:
        return f"row {row} has columns that are not in the product"
    if len(np.unique(own)) != len(own):
        return f"row {row} has a column twice"
    if isinstance(reduction, TopK):
        falls = values[1:] < values[:-1] if reduction.metric == "euclidean" else values[1:] > values[:-1]
        return f"row {row} is not in the order of its values" if falls.any() else None
    with np.errstate(over="ignore"):  # a threshold beyond the type of the values is infinite
        beyond = values > reduction.t if reduction.metric == "euclidean" else values < reduction.t
    return f"row {row} has values beyond the threshold" if beyond.any() else None

"""The check of a whole product: Freivalds' test on the blocks of A, B and C, and a comparison of single elements.

Freivalds (1977): for random vectors X, ``A (B X)`` and ``C X`` must agree. The test takes O(n^2) operations for each
vector instead of O(n^3), and reads each matrix once. The vectors (`distmm.checking.sketch`), products and comparisons
are those of a job. A row that exceeds its tolerance, or is far above the other rows, is computed again element by
element. This decides rows with inf or NaN, and finds the first wrong element. If the columns of B differ much in size,
or are near the limits of float64's range, a second test divides them by powers of two (`distmm.checking.scaling`). Each
matrix is then read twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import dask
import dask.array as da
import numpy as np

from distmm.checking import sampled_elements, sampled_errors, sketch
from distmm.checking.block_rows import Part, Pass, Sampled, whole
from distmm.checking.comparison import compared, elements, stands_out
from distmm.checking.scaling import EMPTY, SPOILT, exponents, scaled, uneven, weights
from distmm.checking.thin_products import Sums
from distmm.checking.verdict import Outcome, Verdict, of_tolerance
from distmm.worker.gpu_copies import blocks_to_host
from distmm_kernels.tolerance import SIGMAS, Tolerance, mantissa

VECTORS = sketch.VECTORS_OF_INTEGERS  # a job has fewer: it tests each block on its own, and so finds smaller errors
SUSPECTS = 16  # number of rows that are computed again element by element; each takes O(kn)
# Rows are suspect above this multiple of a vector's median residual. Gaussian errors of 10**6 rows reach 8.
OUTLIER = 12.0

OVERFLOW = "a sum on the way to it may overflow or not, by the order of its terms: scale A or B"


def fetch(*arrays: da.Array) -> tuple[np.ndarray, ...]:
    """Compute arrays and return them as NumPy arrays. Workers copy GPU blocks to host memory first.

    A client that receives GPU blocks over UCX maps the worker's memory pool, which then cannot be freed until it exits.
    """
    return tuple(dask.compute(*map(blocks_to_host, arrays)))


@dataclass(frozen=True)
class ProductCheck:
    """A check that c is alpha a @ b. The blocks may be in GPU memory.

    The verdict names a chunk of C: one of `c_chunks`, or of the blocks of `c` if the user's C has no chunks.
    """

    a: da.Array
    b: da.Array
    c: da.Array
    tolerance: Tolerance
    alpha: complex = 1
    c_chunks: tuple[tuple[int, ...], ...] | None = None

    def by_vectors(self, seed: int) -> Verdict:
        """Test all rows, then compute the rows again that fail or are outliers."""
        x = sketch.vectors(seed, 0, self.c.shape[1], self.tolerance.exact, VECTORS)
        if self.tolerance.exact:
            a, _, c = self._parts(x, None)
            return self._by_rows(a.sums, c.sums, np.zeros((1, len(x)), np.int32))
        # Half of the vectors are for an eighth of the columns each: errors of fewer columns then hide a small one.
        eighth = np.arange(len(x)) * (VECTORS // 2) // max(1, len(x))
        x[:, VECTORS // 2 :] *= eighth[:, None] == np.arange(VECTORS // 2)
        (m, n), sampled = self.c.shape, None  # rows of A, and columns of B, of which elements of C are sampled
        if self.tolerance.narrow and m and n:
            sampled = sampled_elements.positions(m, seed, 0), sampled_elements.positions(n, seed, 1)
        a, b, c = self._parts(x, None, sampled)
        verdict = self._floats(x, a.sums, c.sums, exponents(b.largest))
        if sampled is None or verdict.outcome == "wrong":
            return verdict
        message = self._rounding(a.sampled, b.sampled, c.sampled)
        return Verdict("wrong", math.inf, message) if message else verdict

    def full(self) -> Verdict:
        """Compare all elements of C. For matrices of which this process can hold several copies."""
        a, b, c = (da.from_array(x, chunks=-1, name=False) for x in fetch(self.a, self.b, self.c))
        with dask.config.set(scheduler="synchronous"):
            bad, residual, _ = ProductCheck(a, b, c, self.tolerance, self.alpha)._elements(np.arange(len(c)))
        right = f"every element of C is right, the largest error is {of_tolerance(residual)}"
        return Verdict("right", residual, right) if bad is None else bad

    def _floats(self, x: np.ndarray, left: Sums, right: Sums, columns: np.ndarray) -> Verdict:
        """Compare both sides. If the columns of B make that inconclusive, compare again with weights."""
        spoilt = ~np.isfinite(left.norms[:, 0]), columns == SPOILT
        message = self._finite_where_spoilt(*spoilt)
        if message:
            return Verdict("wrong", math.inf, f"C is not A @ B: {message}")
        if not spoilt[1].any():
            verdict = self._by_rows(left, right, np.zeros((1, len(columns)), np.int32), spoilt[0])
            if verdict.outcome == "wrong" or not uneven(columns):
                return verdict
        # Smaller weights would divide the error by underflow, too, which would then hide all columns of a row.
        rows = (np.frexp(left.norms)[1] + left.exponents)[np.isfinite(left.norms) & (left.norms > 0)]
        product = int(rows.max(initial=EMPTY)) + mantissa(self.alpha)[1]
        by = weights(columns, math.frexp(self.tolerance.underflow(self.alpha))[1] - product)[None]
        a, _, c = self._parts(x, by)
        return self._by_rows(a.sums, c.sums, by[:, ~spoilt[1]], spoilt[0])

    def _rounding(self, rows: np.ndarray, columns: np.ndarray, given: np.ndarray) -> str | None:
        """Return a message if the errors of the sampled elements are larger than the precision allows."""
        some = sampled_elements.Columns(np.arange(columns.shape[1]), columns)
        sample = sampled_elements.sampled(None, rows, [some])
        level = 0.0 if sample is None else sampled_errors.level(self.tolerance, sample, 0, given, self.alpha)[0]
        what = f"the errors of {given.size} sampled elements are {level:.2g} times what rounding causes"
        return f"C is not A @ B: {what} at this precision" if level > 1 else None

    def _by_rows(self, left: Sums, right: Sums, columns: np.ndarray, left_out: np.ndarray | None = None) -> Verdict:
        """Decide the rows that fail or are outliers by their elements, and return the verdict."""
        ratio, _, known = compared(self.tolerance, left, right, columns, self.alpha)
        ratio[~known] = np.inf
        if left_out is not None:
            ratio[left_out] = 0
        rows = ratio.max(axis=1, initial=0.0)
        residual = float(rows[rows <= 1].max(initial=0.0))
        suspects = np.flatnonzero(np.any([stands_out(of_vector, above=OUTLIER) for of_vector in ratio.T], axis=0))
        suspects = np.sort(suspects[np.argsort(-rows[suspects], kind="stable")[:SUSPECTS]])
        bad, _, dependence = self._elements(suspects, rows)
        if bad is not None:
            return bad if bad.outcome == "wrong" else replace(bad, residual=residual)
        if np.count_nonzero(rows > dependence) > SUSPECTS:
            what = f"more than {SUSPECTS} rows have inf or NaN, or sums that float64 cannot compare"
            which = f"only the first {SUSPECTS} were checked, which are right: scale A or B, or use check='full'"
            return Verdict("cannot tell", residual, f"C may be A @ B or not: {what}, and {which}")
        return Verdict("right", residual, f"C agrees with A @ B on {VECTORS} random vectors")

    def _elements(self, at: np.ndarray, rows: np.ndarray | None = None) -> tuple[Verdict | None, float, float]:
        """Compute some rows of C again, in O(kn) each, and compare their elements.

        Returns the verdict on the first element that is wrong, or else cannot be compared; the largest ratio; and the
        factor of the tolerance (`Sample.dependence`). `rows` has the ratios of all rows, if some stand out.
        """
        if not at.size:
            return None, 0.0, 1.0
        work, dependence = self.tolerance.sketched, 1.0
        lines, given = fetch(self.a[at], self.c[at])
        panel, given, own = lines.astype(work), given.astype(work), np.zeros(len(at), np.int32)
        if not self.tolerance.exact:
            own = exponents(abs(panel).max(axis=1, initial=0))
            own[(own == EMPTY) | (own == SPOILT)] = 0
            panel = scaled(panel, -own[:, None])
            panel = np.concatenate([panel, abs(panel)])
        (product,) = dask.compute(Pass("B", work, len(at)).over(self.b, panel.T, form="transpose"))
        values, norms, shift, sizes = (x.T for x in whole(product).sums)
        compare = partial(elements, self.tolerance, Sums(values, norms, shift + own[:, None], sizes), given, self.alpha)
        truth, ratio, unknown = compare()
        if not self.tolerance.exact and (ratio > 1 / SIGMAS).any():  # more than one standard deviation
            dependence = self._dependence(lines, ratio)
            truth, ratio, unknown = compare(dependence)
        residual = float(ratio.max(initial=0.0))
        outcomes: tuple[tuple[Outcome, np.ndarray], ...] = ("wrong", ratio > 1), ("cannot tell", unknown)
        for outcome, bad in outcomes:
            if not bad.any():
                continue
            first, column = np.argwhere(bad)[0].tolist()
            row, wrong = int(at[first]), outcome == "wrong"
            with np.errstate(over="ignore"):
                one, other = (x[first, column].astype(self.tolerance.dtype) for x in (given, truth))
            text, what = f"at [{row}, {column}]", f"C has {one}, the product is {other}"
            if rows is None:
                count = f"{int(bad.sum())} of {bad.size} elements {'are off' if wrong else 'cannot be compared'}"
                text = f"{count}, the first {text}:"
            elif wrong:
                ends = (np.cumsum(chunks) for chunks in self.c_chunks or self.c.chunks)
                i, j = (int(np.searchsorted(e, x, side="right")) for e, x in zip(ends, (row, column), strict=True))
                text = f"row {row} stands out; first bad block C[{i}, {j}], {text}"
            about = "C is not A @ B: {}" if wrong else f"C may be A @ B or not: {{}}, and {OVERFLOW}"
            ratio_of_row = residual if rows is None else float(rows[row])
            return Verdict(outcome, ratio_of_row, about.format(f"{text} {what}")), residual, dependence
        return None, residual, dependence

    def _dependence(self, lines: np.ndarray, ratio: np.ndarray) -> float:
        """Return the dependence of the roundings of the worst elements."""
        worst = np.argpartition(-ratio, min(sampled_elements.EDGE, ratio.size) - 1, axis=None)[: sampled_elements.EDGE]
        rows, columns = np.unravel_index(worst, ratio.shape)
        at, where = np.unique(columns, return_inverse=True)
        (found,) = fetch(self.b[:, at])
        some = sampled_elements.Columns(np.arange(len(worst)), found[:, where])
        sample = sampled_elements.sampled(None, lines[rows], [some])
        return 1.0 if sample is None else float(sample.dependence[0])

    def _finite_where_spoilt(self, rows: np.ndarray, columns: np.ndarray) -> str | None:
        """Return a message if C is finite in a row or column that must be inf or NaN.

        A row of A or column of B with inf or NaN gives an infinite or undefined term to each element of C in it. The
        test leaves them out, because all of their products with random vectors are inf or NaN.
        """
        for axis, word, source, spoilt in ((0, "row", "A", rows), (1, "column", "B", columns)):
            if not spoilt.any():
                continue
            values = self.c.astype(np.float32) if self.c.dtype.itemsize < 4 else self.c
            (wrong,) = fetch(da.isfinite(values).any(axis=1 - axis))
            if (wrong & spoilt).any():
                line = int(np.argmax(wrong & spoilt))
                (given,) = fetch(self.c[line] if axis == 0 else self.c[:, line])
                other = int(np.argmax(np.isfinite(given.astype(self.tolerance.work))))
                at = [line, other] if axis == 0 else [other, line]
                return f"at {at} C has {given[other]}, but {word} {line} of {source} has inf or NaN"
        return None

    def _parts(
        self, x: np.ndarray, by: np.ndarray | None, sampled: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[Part, Part, Part]:
        """Return what one pass finds in A, B and C: A times ``B X``, B times X, C times X, and sampled elements.

        Without weights `by` also the largest absolute values of the columns of B, if they are floats.
        """
        work, by_column = self.tolerance.sketched, None if by is None else by[0]
        largest = None if self.tolerance.exact or by is not None else self.tolerance.work
        of_a, of_b, of_c = None, None, None
        if sampled is not None:
            rows, columns = sampled
            of_a, of_b, of_c = Sampled(rows), Sampled(None, columns), Sampled(rows, columns)
        b = Pass("B", work, VECTORS, largest, of_b).over(self.b, x, by_column)
        chunks = self.b.chunks[0], (VECTORS + 1,)
        y = b.map_blocks(_with_norms, dtype=work, chunks=chunks, new_axis=1, meta=np.empty((0, 0), work))
        a = Pass("A", work, VECTORS, None, of_a).over(self.a, y)
        c = Pass("C", work, VECTORS, None, of_c).over(self.c, x, by_column)
        found = dask.compute(a, b, c)
        return whole(found[0]), whole(found[1]), whole(found[2])


def _with_norms(part: np.ndarray) -> np.ndarray:
    """Return sums and norms of a row of blocks as the vectors for A, and for its absolute values."""
    sums = part[0].sums.at(0)
    return np.hstack([sums.values, sums.norms.astype(sums.values.dtype)])

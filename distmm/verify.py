"""Is C the product of A and B? Freivalds' test, blocked over the cluster, and the full comparison for small sizes.

Freivalds (1977): for random vectors X, ``A (B X)`` and ``C X`` must agree. That costs O(n^2) a vector instead of
O(n^3), reads each matrix once, and shares nothing with the kernels: plain Dask products of blocks with thin panels,
in float64.

*Integers* wrap around, and so does the test: it is computed in the same two's complement ring, and the two sides must
be equal.

*Floats* must agree within `distmm.tolerance`. A row that exceeds it, or that stands out from the others, is
computed again element by element, which settles rows with inf or NaN and names the first wrong element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np

from distmm.errors import InputError, WrongResultError
from distmm.geometry import Problem
from distmm.operands import Operand, check_pair, wrap
from distmm.runtime import cluster
from distmm.tasks import to_device, to_host
from distmm.tolerance import Tolerance, in_type, stands_out

__all__ = ["CHECKS", "VECTORS", "Verdict", "check_possible", "verify"]

CHECKS = ("freivalds", "full", "none")

# Random vectors. A wrong row escapes one vector with probability 1/2 at most, and all of them with 2**-16.
VECTORS = 16

# Rows that are computed again element by element, each at O(kn).
SUSPECTS = 16

# The full comparison holds A, B and C in float64 at once; above this many operations it would take minutes.
FULL_FLOPS = 2 * 4096**3

# Edges of the blocks of the check where the operands are not chunked: 33 MB and 0.5 GB in float64.
CPU_EDGE, GPU_EDGE = 2048, 8192


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


def verify(
    A: Any,
    B: Any,
    C: Any,
    *,
    check: Literal["freivalds", "full"] = "freivalds",
    seed: int = 0,
    transa: bool = False,
    transb: bool = False,
    alpha: complex = 1,
    precision: str = "highest",
) -> Verdict:
    """Check that ``C = alpha * op(A) @ op(B)``.

    Parameters
    ----------
    A : array-like of shape (m, k)
    B : array-like of shape (k, n)
    C : array-like of shape (m, n)
        Dask, NumPy or CuPy arrays, or Zarr-like objects. They are read once, block by block.
    check : {"freivalds", "full"}
        "freivalds": random vectors, O(n^2); "full": every element against a float64 product, for small sizes.
    seed : int
        Seed of the random vectors.
    transa, transb, alpha
        As in `distmm.gemm`.
    precision : str
        With which C was computed: "high" and "medium" round the operands, and may err more.

    Raises
    ------
    InputError
        If the shapes do not belong together, or a full check would be too large.
    """
    a, b, c = wrap(A, "A", transa), wrap(B, "B", transb), wrap(C, "C")
    for operand in (a, b, c):
        if len(operand.shape) != 2:
            raise InputError(
                f"{operand.name} has shape {operand.shape}: verify takes matrices; check batches one by one"
            )
    check_pair(a, b)
    expected = (a.shape[0], b.shape[1])
    if c.shape != expected:
        raise InputError(f"C has shape {c.shape}, but A {a.shape} times B {b.shape} has shape {expected}")
    if check not in ("freivalds", "full"):
        raise InputError(f"check {check!r} is not one of freivalds, full")
    check_possible(check, Problem(a.shape[0], a.shape[1], b.shape[1], c.dtype))
    tolerance = Tolerance.of(a.dtype, b.dtype, c.dtype, a.shape[1], precision)
    if check == "full":
        return _full(_blocks((a, b, c), tolerance.work, on_gpu=False), tolerance, alpha)
    on_gpu = _on_gpu((a, b, c), tolerance.work)
    left, right, product = _blocks((a, b, c), tolerance.work, on_gpu)
    if alpha != 1:
        right = right * in_type(alpha, tolerance.work)
    return _Freivalds(left, right, product, tolerance, on_gpu).run(seed)


def check_possible(check: str, problem: Problem) -> None:
    """Refuse a check that makes no sense for a product, or would take too long; said before any work.

    Raises
    ------
    InputError
    """
    if check == "freivalds" and problem.dtype.kind == "b":
        raise InputError("C is boolean, and Freivalds' test needs a ring: use check full or none")
    if check == "full" and problem.flops > FULL_FLOPS:
        raise InputError(
            f"a full check of a product of {problem.flops:.2g} operations would take more than {FULL_FLOPS:.2g} in "
            f"float64: use check freivalds"
        )


def _on_gpu(operands: tuple[Operand, ...], work: np.dtype) -> bool:
    """Whether the check runs on GPUs: float blocks that are there, or a cluster whose workers own GPUs."""
    if work.kind not in "fc":
        return False
    client = cluster.current_client()
    return all(x.kind == "cupy" for x in operands) or (
        client is not None and cluster.describe(client, work).device == "cuda"
    )


def _blocks(operands: tuple[Operand, ...], work: np.dtype, on_gpu: bool) -> list[da.Array]:
    """Return operands as Dask arrays of type `work`, their blocks in GPU or host memory."""
    edge = GPU_EDGE if on_gpu else CPU_EDGE
    arrays = []
    for operand in operands:
        # Whole multiples of a file's chunks, near the edge that a block should have.
        edges = tuple(max(1, edge // c) * c for c in operand.storage_chunk or (edge, edge))
        chunks = operand.chunks or da.core.normalize_chunks(edges, operand.shape, dtype=operand.dtype)
        array = operand.blocked(chunks, "cuda" if on_gpu else "cpu")
        if operand.kind == "cupy" and not on_gpu:
            array = array.map_blocks(to_host, dtype=array.dtype, meta=np.empty((0, 0), array.dtype))
        arrays.append(array.astype(work))
    return arrays


def _fetch(*arrays: da.Array) -> tuple[np.ndarray, ...]:
    """Compute arrays and bring them here as NumPy arrays.

    Blocks leave their GPU on the worker: a client that receives them over UCX maps the worker's memory pool, and keeps
    that memory from being freed for as long as it lives itself.
    """
    on_host = (x.map_blocks(to_host, dtype=x.dtype, meta=np.empty((0,) * x.ndim, x.dtype)) for x in arrays)
    return tuple(dask.compute(*on_host))


@dataclass(frozen=True)
class _Freivalds:
    """The test with random vectors, of blocked matrices in the tolerance's working type."""

    a: da.Array
    b: da.Array
    c: da.Array
    tolerance: Tolerance
    on_gpu: bool

    def run(self, seed: int) -> Verdict:
        """Test all rows at once, then look at those that fail or stand out."""
        a, b, c, exact = self.a, self.b, self.c, self.tolerance.exact
        rng = np.random.default_rng(seed)
        shape = (b.shape[1], VECTORS)
        # Modulo 2**w an error may be a multiple of a power of two, which signs would miss: any residue, instead.
        x = rng.integers(0, 2**64, shape, dtype=np.uint64) if exact else rng.choice(np.array([-1.0, 1.0]), shape)
        rebuilt = a @ (b @ self._beside(x, b.chunks[1])).rechunk((a.chunks[1], VECTORS))
        given = c @ self._beside(x, c.chunks[1])
        with np.errstate(invalid="ignore", over="ignore"):
            if exact:
                ratio = self.tolerance.differ(*_fetch(rebuilt, given)) * np.inf
            else:
                b_rows = da.sqrt((da.absolute(b) ** 2).sum(axis=1)).rechunk((a.chunks[1],))
                c_rows = da.sqrt((da.absolute(c) ** 2).sum(axis=1))
                left, right, spread, size = _fetch(rebuilt, given, da.absolute(a) @ b_rows, c_rows)
                ratio = self.tolerance.ratio(left, right, spread[:, None], size[:, None], terms=c.shape[1])
                # Two sums that are both inf or NaN say nothing about their other terms.
                ratio[~np.isfinite(left) | ~np.isfinite(right)] = np.inf
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

    def _beside(self, x: np.ndarray, rows: tuple[int, ...]) -> da.Array:
        """Return `x` cut along its first dimension, with blocks where those of the matrices are."""
        blocks = da.from_array(x, chunks=(rows, *x.shape[1:]))
        return blocks.map_blocks(to_device, dtype=x.dtype, meta=blocks._meta) if self.on_gpu else blocks

    def _first_bad_block(self, row: int) -> str | None:
        """Recompute one row, O(kn), to name the first bad block and element; None if every element is right."""
        line = self.a[row]
        with np.errstate(invalid="ignore", over="ignore"):
            if self.tolerance.exact:
                truth, given = _fetch(line @ self.b, self.c[row])
                bad = self.tolerance.differ(truth, given)
            else:
                truth, given, spread = _fetch(line @ self.b, self.c[row], da.absolute(line) @ da.absolute(self.b))
                bad = self.tolerance.ratio(truth, given, spread, np.abs(truth)) > 1
        if not bad.any():
            return None
        column = int(np.argmax(bad))
        i, j = (
            int(np.searchsorted(np.cumsum(self.c.chunks[d]), at, side="right")) for d, at in ((0, row), (1, column))
        )
        values = _values(given[column], truth[column], self.tolerance.dtype)
        return f"first bad block C[{i}, {j}], at [{row}, {column}] {values}"

    def _without_non_finite(self, seed: int) -> Verdict:
        """Settle rows of A and columns of B with inf or NaN, which spoil every random vector, then test the rest.

        Every element of C in such a row or column has an infinite or undefined term, so none may be finite.
        """
        a, b, c = self.a, self.b, self.c
        rows, columns = _fetch(~da.isfinite(a).all(axis=1), ~da.isfinite(b).all(axis=0))
        for axis, spoilt in ((0, rows), (1, columns)):
            at = np.flatnonzero(spoilt)
            (wrong,) = _fetch(da.isfinite(c).any(axis=1 - axis))
            if wrong[at].any():
                line = f"{'row' if axis == 0 else 'column'} {at[np.argmax(wrong[at])]}"
                source = "A" if axis == 0 else "B"
                message = f"C is not A @ B: {line} holds finite values, but {source} has inf or NaN there"
                return Verdict(False, math.inf, message)
        if not rows.any() and not columns.any():
            message = (
                f"C overflowed in more than {SUSPECTS} rows; the first are right: scale A or B, or use check='full'"
            )
            return Verdict(False, math.inf, message)
        keep = self._beside(~rows, c.chunks[0])[:, None] & self._beside(~columns, c.chunks[1])[None, :]
        a = da.where(self._beside(rows, a.chunks[0])[:, None], 0, a)
        b = da.where(self._beside(columns, b.chunks[1])[None, :], 0, b)
        return replace(self, a=a, b=b, c=da.where(keep, c, 0)).run(seed)


def _values(given: Any, truth: Any, dtype: np.dtype) -> str:
    with np.errstate(over="ignore"):
        return f"C has {np.asarray(given).astype(dtype)}, the product is {np.asarray(truth).astype(dtype)}"


def _full(blocks: list[da.Array], tolerance: Tolerance, alpha: complex) -> Verdict:
    left, right, given = _fetch(*blocks)
    with np.errstate(invalid="ignore", over="ignore"):
        right = right * in_type(alpha, tolerance.work)
        truth = left @ right
        if tolerance.exact:
            ratio = np.where(tolerance.differ(truth, given), np.inf, 0.0)
        else:
            ratio = tolerance.ratio(truth, given, np.abs(left) @ np.abs(right), np.abs(truth))
    bad = ratio > 1
    residual = float(ratio.max(initial=0.0))
    if not bad.any():
        return Verdict(True, residual, f"every element of C is right, the largest error is {residual:.2g} of its bound")
    row, column = (int(x) for x in np.unravel_index(int(np.argmax(bad)), bad.shape))
    where = f"{int(bad.sum())} of {bad.size} elements are off, the first at [{row}, {column}]: "
    return Verdict(
        False, residual, f"C is not A @ B: {where}{_values(given[row, column], truth[row, column], tolerance.dtype)}"
    )

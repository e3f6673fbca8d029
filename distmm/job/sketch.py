r"""The certificate of one block of C: Freivalds' test on sketches that are made while the blocks are in memory.

With random vectors X_j, a few columns for each block column of C, and one pass over each block that is there anyway::

    Y_pj = B_pj X_j                  on the home of B_pj, once a wave        of_b (all that are there)
    S_i  = sum_p A_ip [Y_p0 Y_p1 ..] on the homes of A_ip, once a wave       of_a
    C_ij X_j  ~  alpha S_ij          where C_ij is written                   judge

Each block of A is read once for all the block columns of a wave, so the test costs O(n^2) where the product costs
O(n^3). The sums are in float64 (integers: modulo 2**64) and share nothing with the kernels.

The vectors are +-U(1, 2): never near zero, so that no single error hides, and continuous, so that errors in one row
cancel with probability zero, not one half. For integers, whose errors may be multiples of a power of two, the first
vector is odd, which no single error escapes, and the other any residue.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm import gpu
from distmm.host import device
from distmm.tolerance import Tolerance, in_type, stands_out

__all__ = ["VECTORS", "Judgement", "Sketch", "judge", "of_a", "of_b", "vectors"]

VECTORS = 2

# Root mean square of +-U(1, 2).
RMS = math.sqrt(7 / 3)

# Bytes of a piece of a block in the working type: it stays in a core's cache, and in the GPU's.
CPU_PIECE, GPU_PIECE = 2**19, 2**26

Block = Any  # a NumPy or CuPy array


@dataclass(frozen=True)
class Sketch:
    """A block times some vectors, with sums of squares that bound its errors.

    Attributes
    ----------
    values : array of shape (rows, vectors)
    rows : array of shape (rows,)
        Sums of squares of the block's rows.
    columns : array
        Sums of squares of the blocks of B that went into `values`, one for each block column.
    """

    values: np.ndarray
    rows: np.ndarray
    columns: np.ndarray


@dataclass(frozen=True)
class Judgement:
    """What the test says of one block.

    Attributes
    ----------
    ok : bool
    settled : bool
        False where inf or NaN leave nothing to compare: then only another worker's bits can confirm the block.
    residual : float
        Largest ratio of an error to its bound over rows and vectors; 0 for integers that agree.
    row : int
        Where that is, in the block.
    """

    ok: bool
    settled: bool
    residual: float
    row: int


def vectors(seed: int, column: int, width: int, exact: bool) -> np.ndarray:
    """Random vectors ``(width, VECTORS)`` for one block column of C: the same on every worker and in every run."""
    rng = np.random.default_rng([seed, column])
    if not exact:
        return np.asarray(rng.uniform(1, 2, (width, VECTORS)) * rng.choice([-1.0, 1.0], (width, VECTORS)))
    x = rng.integers(0, 2**64, (width, VECTORS), dtype=np.uint64)
    x[:, 0] |= np.uint64(1)
    return x


def of_b(where: object, blocks: list[Block], seed: int, columns: tuple[int, ...], work: np.dtype) -> list[Sketch]:
    """Sketches ``Y_pj`` of blocks ``(k, n)`` of a panel of B at one home, in host memory."""

    def one(block: Block, column: int) -> Sketch:
        values, rows = _times(block, vectors(seed, column, block.shape[1], work.kind == "u"), work)
        return Sketch(values, rows, np.array([rows.sum()]))

    return [one(block, column) for block, column in zip(blocks, columns, strict=True)]


def of_a(where: object, before: Sketch | None, block: Block, right: list[list[Sketch]], work: np.dtype) -> Sketch:
    """Add ``A_ip [Y_p0 Y_p1 ..]`` of one block of A ``(m, k)`` to the sum over the panels before."""
    panel = list(itertools.chain.from_iterable(right))
    values, rows = _times(block, np.hstack([sketch.values for sketch in panel]), work)
    columns = np.concatenate([sketch.columns for sketch in panel])
    if before is None:
        return Sketch(values, rows, columns)
    with np.errstate(over="ignore", invalid="ignore"):
        return Sketch(before.values + values, before.rows + rows, before.columns + columns)


def _times(block: Block, x: np.ndarray, work: np.dtype, on_gpu: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the block times `x`, and the sums of squares of its rows (none for integers), in host memory."""
    xp = gpu.namespace(block)
    if xp is np and on_gpu and block.size:
        made = (_times(piece, x, work) for piece in device.pieces(block))
        values, rows = zip(*made, strict=True)
        return np.concatenate(values), np.concatenate(rows)
    if xp is np:
        return _by_pieces(np, block, x, work, CPU_PIECE)
    with gpu.working("product"):
        values, rows = _by_pieces(xp, block, x, work, GPU_PIECE)
        return values.get(), rows.get()


def _by_pieces(xp: Any, block: Block, x: np.ndarray, work: np.dtype, piece: int) -> tuple[Any, Any]:
    m, k = block.shape
    step = max(1, piece // max(1, k * work.itemsize))
    right = xp.asarray(x.astype(work))
    values, rows = xp.zeros((m, x.shape[1]), work), xp.zeros(m)
    converted = xp.empty((min(step, m), k), work)  # one buffer: new memory for each piece costs more than the sums
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(0, m, step):
            part = converted[: min(step, m - i)]
            part[...] = block[i : i + step]
            values[i : i + step] = part @ right
            if work.kind != "u":
                squares = np.vecdot(part, part) if xp is np else xp.sum(part * part.conj(), axis=1)
                rows[i : i + step] = squares.real
    return values, rows


def judge(
    tolerance: Tolerance,
    left: Sketch,
    position: int,
    block: np.ndarray,
    x: np.ndarray,
    alpha: complex = 1,
    beta: complex = 0,
    added: np.ndarray | None = None,
    on_gpu: bool = False,
) -> Judgement:
    """Compare a block of C ``(m, n)`` with what the sketches say of it.

    Parameters
    ----------
    tolerance : Tolerance
    left : Sketch
        ``S_i`` over all panels.
    position : int
        Place of this block among the block columns of `left`.
    block : array of shape (m, n)
    x : array
        The vectors of this block column.
    alpha, beta : scalars
    added : array of shape (m, n), optional
        The block of the C that was there before, times beta.
    on_gpu : bool
        Have the worker's GPU read the block, which is in host memory, piece by piece: 0.2 s for one of 28672 x 28672
        bfloat16. NumPy took 2.6 s with 16 threads, which wait for each other's lock on Python.
    """
    work = tolerance.work
    given, squares = _times(block, x, work, on_gpu)
    truth = left.values[:, position * VECTORS : (position + 1) * VECTORS]
    extra = np.zeros(block.shape[0])
    with np.errstate(over="ignore", invalid="ignore"):
        if alpha != 1:
            truth = truth * in_type(alpha, work)
        if added is not None:
            more, extra = _times(added, x, work, on_gpu)
            truth = truth + more * in_type(beta, work)
        if tolerance.exact:
            wrong = tolerance.differ(truth, given).any(axis=1)
            return Judgement(not wrong.any(), True, math.inf if wrong.any() else 0.0, int(np.argmax(wrong)))
        spread = abs(alpha) * np.sqrt(left.rows * left.columns[position])
        size = np.sqrt(squares) + abs(beta) * np.sqrt(extra)
        ratio = tolerance.ratio(truth, given, RMS * spread[:, None], RMS * size[:, None], terms=block.shape[1])
    known = np.isfinite(truth).all(axis=1) & np.isfinite(given).all(axis=1) & np.isfinite(spread) & np.isfinite(size)
    rows = np.where(known, ratio.max(axis=1, initial=0.0), 0.0)
    row = int(np.argmax(rows)) if rows.size else 0
    suspect = bool(stands_out(rows).any())
    return Judgement(bool(known.all()) and not suspect, bool(known.all()) or suspect, float(rows.max(initial=0.0)), row)

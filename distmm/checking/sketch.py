r"""The certificate of one block of C: Freivalds' test on sketches that are made while the blocks are in memory.

X_j are random vectors, two columns (for integers 16) for each block column of C. Each block is multiplied by vectors
once, on the worker that has it in memory anyway::

    Y_pj = B_pj X_j                  on the home of B_pj, once a wave        of_b (all blocks of a panel there)
    S_i  = sum_p A_ip [Y_p0 Y_p1 ..] on the homes of A_ip, once a wave       of_a
    C_ij X_j  ~  alpha S_ij          where C_ij is written                   judge

Each block of A is read once for all block columns of a wave, so the test costs O(n^2) and the product O(n^3). The sums
are in float64 (of integers: modulo 2**32 or 2**64) and share no code with the kernels. A block in GPU memory is
multiplied by that GPU, and only the products with vectors and some norms are copied to the host.

The vectors are +-U(1, 2). They are never near zero, so each single error shows. They are continuous, so errors in one
row cancel with probability zero; with +-1 it would be one half. Errors of integers may be multiples of a power of two.
For integers the elements of the first vector are odd, so each single error shows, and those of the others are any
residues. A wrong element of A or B makes a whole row or column wrong. If all of these errors are multiples of
2**(w - t) in integers of w bits, one vector misses them with a probability of 2**-t: where the highest bit of an
element was flipped, every other time. So there are 16 vectors. That all of them miss it has a probability below 2**-14.

Where the columns of B differ much in size, the second vector is divided by weights that bring them to one size; the
first vector never is (`weigh`). The weights follow from the first panel, B_0j, because a sum over panels needs the same
weights for all of them. Any weights give a right bound. Weights that do not fit a later panel find fewer errors there,
and the first vector finds those. Rows of A need no weights, because each row of C has a bound of its own. Where sums of
squares would leave float64's range, a row is divided by a power of two, which is kept in the sketch.

The sketches also carry some elements of each block that are computed again, with a bound that is much sharper
(`distmm.checking.sampled_elements`): they find what is wrong with the rounding of the whole block, and the vectors find
what is wrong in one place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm.checking import sampled_elements, sampled_sums
from distmm.checking.sampled_sums import Columns, Sample
from distmm.checking.scaling import SPOILT, exponents, extreme, graded, measured, scaled, weights, widened
from distmm.checking.tolerance import Tolerance, in_type, mantissa, stands_out
from distmm.worker import gpu, gpu_copies

__all__ = ["VECTORS", "Judgement", "Sketch", "judge", "of_a", "of_b", "vectors", "weigh"]

VECTORS, VECTORS_OF_INTEGERS = 2, 16

# Root mean square of +-U(1, 2).
RMS = math.sqrt(7 / 3)

# Bytes of a piece of a block in the working type: it stays in a core's cache, and in the GPU's.
CPU_PIECE, GPU_PIECE = 2**19, 2**26

# Bounds below this have lost digits to underflow; the test cannot tell then.
FAINT = 2.0**-960

Block = Any  # a NumPy or CuPy array


@dataclass(frozen=True)
class Sketch:
    """A block times some vectors, with norms that bound its errors.

    Attributes
    ----------
    values : array of shape (rows, vectors)
    norms : array of shape (rows, 1) or (rows, vectors)
        Of the block's rows, times the weights.
    exponents : array like `norms`
        `values` and `norms` are to be multiplied by ``2**exponents``.
    columns : array of shape (block columns, vectors of a column)
        Norms of the blocks of B, times the weights, that went into `values`.
    sample : Columns or Sample, optional
        Some columns of B, or sums of some elements of C (`distmm.checking.sampled_sums`).
    """

    values: np.ndarray
    norms: np.ndarray
    exponents: np.ndarray
    columns: np.ndarray
    sample: Columns | Sample | None = None


@dataclass(frozen=True)
class Judgement:
    """What the test says of one block.

    Attributes
    ----------
    ok : bool
    settled : bool
        False where inf, NaN or underflow leave nothing to compare. Only the same bits a second time can confirm the
        block then.
    residual : float
        Largest ratio of an error to its bound over rows and vectors, and of the sampled elements together; 0 for
        integers that agree.
    row : int
        Where that is, in the block.
    """

    ok: bool
    settled: bool
    residual: float
    row: int


def vectors(seed: int, column: int, width: int, exact: bool) -> np.ndarray:
    """Random vectors ``(width, number)`` for one block column of C: the same on every worker and in every run."""
    rng = np.random.default_rng([seed, column])
    if not exact:
        return np.asarray(rng.uniform(1, 2, (width, VECTORS)) * rng.choice([-1.0, 1.0], (width, VECTORS)))
    x = rng.integers(0, 2**64, (width, VECTORS_OF_INTEGERS), dtype=np.uint64)
    x[:, 0] |= np.uint64(1)
    return x


Weights = np.ndarray | None  # exponents (VECTORS, width) by which the columns are divided; None: as they are


def weigh(where: object, blocks: list[Block], columns: tuple[int, ...], work: np.dtype) -> dict[int, Weights]:
    """Choose the weights of some block columns by their blocks ``(k, n)`` in the first panel of B."""
    return {column: _weights(block, work) for block, column in zip(blocks, columns, strict=True)}


def _weights(block: Block, work: np.dtype) -> Weights:
    xp = gpu.namespace(block)
    if work.kind == "u" or not block.size:
        return None

    def largest() -> np.ndarray:
        size = np.zeros(block.shape[1])
        with gpu.working("product") if xp is not np else nullcontext():
            for _, part in _pieces(xp, block, work):
                found = abs(part).max(axis=0)
                size = np.maximum(size, found if xp is np else found.get())
        return size

    found = exponents(largest() if xp is np else gpu.retrying(largest, "the weights of a block"))
    if not graded(found) and not extreme(found):
        return None
    own = weights(found)
    own[found == SPOILT] = 0
    return np.stack([np.full_like(own, own.max()), own])


def of_b(
    where: object, blocks: list[Block], seed: int, columns: tuple[int, ...], work: np.dtype, by: dict[int, Weights]
) -> list[Sketch]:
    """Sketches ``Y_pj`` of blocks ``(k, n)`` of a panel of B at one home, in host memory."""

    def one(block: Block, column: int) -> Sketch:
        x = vectors(seed, column, block.shape[1], work.kind == "u")
        values, norms, shift = _times(block, x, work, by[column])
        if shift.any():
            values, norms = scaled(values, shift), scaled(norms, shift)
        whole = np.broadcast_to(np.hypot.reduce(norms, axis=0), (1, x.shape[1]))
        return Sketch(values, norms, np.zeros_like(shift), whole, sampled_sums.columns_of(block, seed, column))

    return [one(block, column) for block, column in zip(blocks, columns, strict=True)]


def of_a(
    where: object, before: Sketch | None, block: Block, right: list[list[Sketch]], work: np.dtype, *seed: int
) -> Sketch:
    """Add ``A_ip [Y_p0 Y_p1 ..]`` of one block of A ``(m, k)`` to the sum over the panels before; `seed` is of rows."""
    panel = list(itertools.chain.from_iterable(right))
    sample = _sampled(before, block, panel, *seed)
    values, norms, shift = _times(block, np.hstack([sketch.values for sketch in panel]), work)
    columns = np.concatenate([sketch.columns for sketch in panel])
    if before is None:
        return Sketch(values, norms, shift, columns, sample)
    common = np.maximum(before.exponents, shift)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = _to(before.values, before.exponents, common) + _to(values, shift, common)
        norms = np.hypot(_to(before.norms, before.exponents, common), _to(norms, shift, common))
        return Sketch(values, norms, common, np.hypot(before.columns, columns), sample)


def _sampled(before: Sketch | None, block: Block, panel: list[Sketch], *seed: int) -> Sample | None:
    """Add what the panel has to the sums of the sampled elements."""
    columns = [sketch.sample for sketch in panel if isinstance(sketch.sample, Columns)]
    earlier = None if before is None else before.sample
    if len(columns) < len(panel) or (before is not None and not isinstance(earlier, Sample)):
        return None
    return sampled_sums.sampled(earlier if isinstance(earlier, Sample) else None, block, columns, *seed)


def _to(values: np.ndarray, exponent: np.ndarray, common: np.ndarray) -> np.ndarray:
    """Write rows that are to be multiplied by ``2**exponent`` as rows that are to be multiplied by ``2**common``."""
    return np.asarray(scaled(values, exponent - common)) if (exponent != common).any() else values


Times = tuple[Any, Any, Any]  # products (m, v); norms and exponents (m, 1), or (m, v) where each vector has weights


def _times(block: Block, x: np.ndarray, work: np.dtype, by: Weights = None) -> Times:
    """Multiply a block, its columns divided by their weights, by vectors: as `measured`, in host memory."""
    xp = gpu.namespace(block)
    if xp is np:
        return _by_pieces(np, block, x, work, by)

    def on_gpu() -> Times:
        with gpu.working("product"):
            values, norms, shift = (found.get() for found in _by_pieces(xp, block, x, work, by))
            return values, norms, shift

    return gpu.retrying(on_gpu, f"the check of a block, {block.shape[0]} x {block.shape[1]} {block.dtype},")


def _times_uploaded(block: np.ndarray, x: np.ndarray, work: np.dtype, by: Weights) -> Times:
    """Do so on the worker's GPU with a block in host memory, which is copied there some rows at a time."""
    made = (_times(piece, x, work, by) for piece in gpu_copies.pieces(block))
    values, norms, shift = (np.concatenate(parts) for parts in zip(*made, strict=True))
    return values, norms, shift


def _by_pieces(xp: Any, block: Block, x: np.ndarray, work: np.dtype, by: Weights) -> Times:
    m, each = block.shape[0], 1 if by is None else len(by)
    right = xp.asarray(x.astype(work))
    values, norms = xp.zeros((m, x.shape[1]), work), xp.zeros((m, each))
    shift = xp.zeros((m, each), np.int32)
    weight = None if by is None else xp.asarray(by)
    with np.errstate(over="ignore", invalid="ignore"):
        for rows, part in _pieces(xp, block, work):
            if work.kind == "u":
                values[rows] = _sums(xp, part, right)
            elif weight is None:
                values[rows], norms[rows, 0], shift[rows, 0] = measured(part, right)
            else:
                for v in range(each):
                    found = measured(scaled(part, -weight[v]), right[:, v : v + 1])
                    values[rows, v], norms[rows, v], shift[rows, v] = found[0][:, 0], found[1], found[2]
    return values, norms, shift


def _sums(xp: Any, part: Any, right: Any) -> Any:
    """Multiply integers; NumPy has fast sums of two rows of 32-bit words, and no BLAS."""
    if xp is np and part.dtype == np.uint32:
        return np.einsum("ik,vk->iv", part, np.ascontiguousarray(right.T))
    return part @ right


def _pieces(xp: Any, block: Block, work: np.dtype) -> Iterator[tuple[slice, Any]]:
    """Yield some rows after the other in the working type, in one buffer: new memory costs more than the sums."""
    m, k = block.shape
    step = max(1, (CPU_PIECE if xp is np else GPU_PIECE) // max(1, k * work.itemsize))
    converted = xp.empty((min(step, m), k), work)
    for i in range(0, m, step):
        part = converted[: min(step, m - i)]
        part[...] = widened(block[i : i + step])
        yield slice(i, i + step), part


def judge(
    tolerance: Tolerance,
    left: Sketch,
    position: int,
    block: Block,
    x: np.ndarray,
    alpha: complex = 1,
    beta: complex = 0,
    added: np.ndarray | None = None,
    by: Weights = None,
) -> Judgement:
    """Compare a block of C ``(m, n)`` with what the sketches say of it.

    Parameters
    ----------
    tolerance : Tolerance
    left : Sketch
        ``S_i`` over all panels.
    position : int
        Place of this block among the block columns of `left`.
    block : NumPy or CuPy array of shape (m, n)
        One in GPU memory is multiplied there, and not copied.
    x : array
        The vectors of this block column.
    alpha, beta : scalars
    added : array of shape (m, n), optional
        The block of the C that was there before, times beta, in host memory. Where `block` is on a GPU, the GPU reads
        this one too: 0.2 s for one of 28672 x 28672 bfloat16. NumPy took 2.6 s with 16 threads, which wait for each
        other's lock on Python.
    by : array, optional
        The weights of this block column (`weigh`).
    """
    work = tolerance.sketched
    given, size, given_shift = _times(block, x, work, by)
    truth = left.values[:, position * x.shape[1] : (position + 1) * x.shape[1]]
    on_gpu = gpu.namespace(block) is not np
    more = None
    if added is not None:
        more = _times_uploaded(added, x, work, by) if on_gpu and added.size else _times(added, x, work, by)
    if tolerance.exact:
        with np.errstate(over="ignore"):
            truth = truth * in_type(alpha, work) + (0 if more is None else more[0] * in_type(beta, work))
        wrong = tolerance.differ(truth, given).any(axis=1)
        return Judgement(not wrong.any(), True, math.inf if wrong.any() else 0.0, int(np.argmax(wrong)))
    sample = left.sample if isinstance(left.sample, Sample) else None
    dependence = 1.0 if sample is None else sampled_elements.dependence(sample, position)
    factor, exponent = mantissa(alpha)
    underflow = np.array([tolerance.underflow(alpha, columns) for columns in _divisors(by, block.shape[1])])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        bound = left.norms * left.columns[position]
        faint = (bound < FAINT) & (left.norms > 0) & (left.columns[position] > 0)
        # Of all that is compared, and of what underflow changes, the largest power of two.
        shift, lost = left.exponents + exponent, np.frexp(underflow)[1]
        common = np.maximum(np.maximum(shift, given_shift), lost)
        if more is not None:
            beta_factor, beta_exponent = mantissa(beta)
            common = np.maximum(common, more[2] + beta_exponent)
        truth = scaled(truth * in_type(factor, work), shift - common)
        spread, size = scaled(abs(factor) * bound, shift - common), scaled(size, given_shift - common)
        if more is not None:
            by_beta = more[2] + beta_exponent - common
            truth = truth + scaled(more[0] * in_type(beta_factor, work), by_beta)
            size = size + scaled(abs(beta_factor) * more[1], by_beta)
        given = scaled(given, given_shift - common)
        lost_by_rounding = RMS * size, RMS * scaled(underflow, -common), block.shape[1]
        limit = tolerance.limit(RMS * spread, *lost_by_rounding, dependence)
        ratio = tolerance.ratio(truth, given, limit)
        rounding = (tolerance.limit(0.0, *lost_by_rounding) / limit).max(axis=1)
        # Where no sum can have reached the largest number, inf and NaN in C are wrong.
        reach = scaled(max(1.0, abs(alpha)) * bound, left.exponents + int(_divisors(by, 1).max()))
        if more is not None:
            reach = reach + abs(beta) * scaled(more[1], more[2] + int(_divisors(by, 1).max()))
        invented = np.isfinite(truth) & ~np.isfinite(given) & (reach < min(tolerance.most, tolerance.most_sum) / 2)
    known = np.isfinite(truth) & np.isfinite(given) & np.isfinite(spread) & np.isfinite(size) & ~faint
    known |= invented
    rows = np.where(known, ratio, 0.0).max(axis=1, initial=0.0)
    row, largest = int(np.argmax(rows)) if rows.size else 0, float(rows.max(initial=0.0))
    suspect = bool(stands_out(rows, rounding).any())
    if sample is not None and tolerance.narrow:
        level, of_level = sampled_elements.level(tolerance, sample, position, block, alpha, beta, added)
        suspect |= level > 1
        row, largest = (of_level, level) if level > largest else (row, largest)
    return Judgement(bool(known.all()) and not suspect, bool(known.all()) or suspect, largest, row)


def _divisors(by: Weights, width: int) -> np.ndarray:
    return np.zeros((1, width), np.int32) if by is None else by

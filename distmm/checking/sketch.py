r"""The check of one block of C in a job: Freivalds' test on sketches of the blocks that the product has in memory.

X_j are random vectors for block column j of C: two, or 16 for integers. Each block is multiplied by vectors once, on
the worker that has it in memory for the product::

    Y_pj = B_pj X_j                  on the home of B_pj, once a wave        of_b
    S_i  = sum_p A_ip [Y_p0 Y_p1 ..] on the homes of A_ip, once a wave       of_a
    C_ij X_j  ~  alpha S_ij          on the worker that writes C_ij          judge

`distmm_kernels.freivalds` makes the vectors, and says why they are as they are.

*Weights.* If columns of B differ much in size, weights give them a common size for the second vector (`weigh`). They
follow from the first panel, B_0j, because a sum over panels needs the same weights for all of them. Any weights give a
right bound. If they do not suit a later panel, the first vector, which has none, finds the errors there. Rows of A need
no weights, because each row of C has its own bound.

Sampled elements with a much sharper bound (`distmm.checking.sampled_errors`) detect wrong rounding of a whole block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm.checking import sampled_elements, sampled_errors
from distmm.checking.comparison import compared, stands_out
from distmm.checking.scaling import SPOILT, Block, exponents, uneven, weights
from distmm.checking.thin_products import Sums, largest, summed, times
from distmm.worker import gpu, gpu_copies
from distmm_kernels.freivalds import VECTORS, VECTORS_OF_INTEGERS, vectors
from distmm_kernels.tolerance import Tolerance

__all__ = ["VECTORS", "VECTORS_OF_INTEGERS", "Judgement", "Sketch", "judge", "of_a", "of_b", "vectors", "weigh"]

FAINT = 2.0**-960  # least bound of the norm of a row of |A||B|; smaller ones have lost digits to underflow


@dataclass(frozen=True)
class Sketch:
    """A block times some vectors, with norms that bound the errors."""

    sums: Sums
    columns: np.ndarray  # norms (block columns, vectors of a column) of the blocks of B, divided by their weights
    sample: Any  # of B: `sampled_elements.Columns` or None; of A: `sampled_elements.Sample` or None


@dataclass(frozen=True)
class Judgement:
    """The result of the test for one block."""

    ok: bool  # whether the test found no error, and could compare all rows
    settled: bool  # False if inf or NaN prevent that: only a second computation with the same bits confirms the block
    residual: float  # largest ratio of an error to its bound, over rows, vectors and the sampled elements
    row: int  # of that ratio, in the block


Weights = np.ndarray | None  # exponents (VECTORS, width) of the columns' divisors; None: columns are not divided


def weigh(block: Block, work: np.dtype) -> Weights:
    """Choose the weights of a block column by its block ``(k, n)`` in the first panel of B."""
    if work.kind == "u" or not block.size:
        return None
    found = exponents(largest(block, work))
    if not uneven(found):
        return None
    own = weights(found)
    own[found == SPOILT] = 0
    return np.stack([np.full_like(own, own.max()), own])


def of_b(block: Block, seed: int, column: int, work: np.dtype, by: Weights) -> Sketch:
    """Return the sketch ``Y_pj``, in host memory, of a block ``(k, n)`` of B."""
    x = vectors(seed, column, block.shape[1], work.kind == "u")
    sums = times(block, x, work, by).at(0)
    whole = np.broadcast_to(np.hypot.reduce(sums.norms, axis=0), (1, x.shape[1]))
    return Sketch(sums, whole, sampled_elements.columns_of(block, seed, column))


def of_a(before: Sketch | None, block: Block, panel: list[Sketch], work: np.dtype, *seed: int) -> Sketch:
    """Add ``A_ip [Y_p0 Y_p1 ..]`` of one block of A to the sum over the panels before. `seed` is of sampled rows."""
    sample = None
    if before is None or before.sample is not None:
        of_b = [sketch.sample for sketch in panel]
        sample = sampled_elements.sampled(None if before is None else before.sample, block, of_b, *seed)
    sums = times(block, np.hstack([sketch.sums.values for sketch in panel]), work)
    columns = np.concatenate([sketch.columns for sketch in panel])
    if before is None:
        return Sketch(sums, columns, sample)
    return Sketch(summed([before.sums, sums]), np.hypot(before.columns, columns), sample)


def judge(
    tolerance: Tolerance, left: Sketch, position: int, block: Block, x: np.ndarray, alpha: complex = 1,
    beta: complex = 0, added: np.ndarray | None = None, by: Weights = None,
) -> Judgement:  # fmt: skip
    """Compare a block of C with the sketches of A and B.

    `left` is ``S_i``, and `position` the position of the block among its block columns; `x` are the vectors of this
    block column, and `by` its weights (`weigh`). A block in GPU memory is multiplied there. `added` is the block of C0,
    before the multiplication by beta, in host memory. If `block` is on a GPU, the GPU multiplies this one, too: 0.2 s
    for 28672 x 28672 in bfloat16. NumPy took 2.6 s with 16 threads, which wait for Python's global lock.
    """
    work, width = tolerance.sketched, x.shape[1]
    given, more = times(block, x, work, by), None
    if added is not None:
        on_gpu = gpu.namespace(block) is not np and added.size
        made = [times(piece, x, work, by) for piece in (gpu_copies.pieces(added) if on_gpu else [added])]
        more = Sums(*map(np.concatenate, zip(*made, strict=True)))
    sums, bound = left.sums, left.sums.norms * left.columns[position]
    bound = np.where(bound > 0, np.maximum(bound, FAINT), bound)
    truth = Sums(sums.values[:, position * width : (position + 1) * width], sums.norms, sums.exponents, bound)
    sample = left.sample
    dependence = 1.0 if sample is None else sample.dependence[position]
    columns = np.zeros((1, block.shape[1]), np.int32) if by is None else by
    ratio, rounding, known = compared(tolerance, truth, given, columns, alpha, dependence, more, beta)
    rows = np.where(known, ratio, 0.0).max(axis=1, initial=0.0)
    row, largest = int(np.argmax(rows)) if rows.size else 0, float(rows.max(initial=0.0))
    suspect = bool(stands_out(rows, rounding).any())
    if sample is not None and tolerance.narrow:
        level, of_level = sampled_errors.level(tolerance, sample, position, block, alpha, beta, added)
        suspect |= level > 1
        row, largest = (of_level, level) if level > largest else (row, largest)
    return Judgement(bool(known.all()) and not suspect, bool(known.all()) or suspect, largest, row)

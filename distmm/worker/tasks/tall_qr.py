"""The tasks of a tall and skinny QR: QR of blocks, and products with their factors.

LAPACK decomposes a tall block by Householder reflections, which wait for memory most of the time. A float32 or
complex64 block in host memory is decomposed by two Cholesky factors of its Gram matrix instead, in float64. Source:
Yamazaki, Tomov and Dongarra, Mixed-precision Cholesky QR factorization and its case studies on multicore CPU with
multiple GPUs, SIAM J. Sci. Comput. 37, 2015.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm.worker.blas_threads import shared_by

# Condition number up to which the first of two Cholesky factors leaves columns that are orthogonal to 1e-4, from which
# the second one makes them orthogonal to float64's precision: that error is about 2e-16 times the number's square.
MOST_CONDITION = 1e6

PIECE = 1 << 20  # elements that are converted to float64 at a time


def block_qr(block: Any, tasks: int) -> tuple[Any, Any]:
    """Return Q ``(m, n)`` and R ``(n, n)`` of a block ``(m, n)``, m >= n; so many `tasks` run side by side."""
    with shared_by(tasks):
        if type(block) is np.ndarray and block.dtype.char in "fF" and (factors := _by_gram(block)) is not None:
            return factors
        q, r = np.linalg.qr(block)
        return q, r


def _by_gram(block: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return Q and R from the block's Gram matrix; None if the block's columns are too nearly dependent for that."""
    wide, rows = np.result_type(block.dtype, np.float64), max(1, PIECE // max(1, block.shape[1]))
    cuts = [slice(first, first + rows) for first in range(0, len(block), rows)]

    def times(cut: slice, inverse: np.ndarray | None) -> np.ndarray:
        piece: np.ndarray = block[cut].astype(wide)
        return piece if inverse is None else piece @ inverse

    def factor(inverse: np.ndarray | None = None) -> np.ndarray:
        """Return the Cholesky factor of the Gram matrix of the block, or of the block times `inverse`."""
        made = (times(cut, inverse) for cut in cuts)
        return np.linalg.cholesky(sum(q.conj().T @ q for q in made)).conj().T

    try:
        first = factor()
        inverse = np.linalg.inv(first)
        if not np.linalg.norm(first) * np.linalg.norm(inverse) <= MOST_CONDITION:  # also if it is not a number
            return None
        second = factor(inverse)
    except np.linalg.LinAlgError:
        return None
    q, inverse = np.empty_like(block, order="C"), inverse @ np.linalg.inv(second)
    for cut in cuts:
        q[cut] = times(cut, inverse)
    return q, (second @ first).astype(block.dtype)


def stack_factors(stack: Any, svd: bool) -> tuple[Any, ...]:
    """Return Q and R, or with `svd` U, S and Vh, of the stack ``(m, n)`` of all R.

    It uses all of BLAS's threads: the other tasks of the QR wait for it.
    """
    q, r = block_qr(stack, 1)
    if not svd:
        return q, r
    u, s, vh = np.linalg.svd(r)
    return q @ u, s, vh


def rows_times(block: Any, parts: tuple[Any, ...], tasks: int, block_id: tuple[int, int]) -> Any:
    """Return the product of a block ``(m, n)`` of Q and a matrix ``(n, n)``; so many `tasks` run side by side.

    The matrix is what belongs to this block in the first factor of the stack: n rows of it (`stack_factors`).
    """
    n = block.shape[1]
    with shared_by(tasks):
        return block @ parts[0][block_id[0] * n : (block_id[0] + 1) * n]

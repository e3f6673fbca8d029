"""The tasks of a tall and skinny QR: QR of blocks, and products with their factors.

LAPACK decomposes a tall block by Householder reflections, which wait for memory most of the time.
A float32 or complex64 block is decomposed by two Cholesky factors of its Gram matrix instead, in float64: products, of
which both are good. Source: Yamazaki, Tomov and Dongarra, Mixed-precision Cholesky QR factorization and its case
studies on multicore CPU with multiple GPUs, SIAM J. Sci. Comput. 37, 2015.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from distmm.worker import gpu
from distmm.worker.blas_threads import shared_by

# Condition number up to which the first of two Cholesky factors leaves columns that are orthogonal to 1e-4, from which
# the second one makes them orthogonal to float64's precision: that error is about 2e-16 times the number's square.
MOST_CONDITION = 1e6

PIECE = 1 << 24  # elements that are converted to float64 at a time


def block_qr(block: Any, tasks: int) -> tuple[Any, Any]:
    """Return Q ``(m, n)`` and R ``(n, n)`` of a block ``(m, n)``, m >= n; so many `tasks` run side by side."""
    with shared_by(tasks):
        found = _by_gram(block) if block.dtype.char in "fF" else None
        if found is None:
            q, r = np.linalg.qr(block)
            found = q, r
    return found


def _by_gram(block: Any) -> tuple[Any, Any] | None:
    """Return Q and R from the block's Gram matrix; None if the block's columns are too nearly dependent for that."""
    library, wide = gpu.namespace(block), np.result_type(block.dtype, np.float64)

    def pieces() -> Iterator[Any]:
        rows = max(1, PIECE // max(1, block.shape[1]))
        return (block[first : first + rows].astype(wide) for first in range(0, len(block), rows))

    def factor(inverse: Any) -> np.ndarray:
        """Return the Cholesky factor of the Gram matrix of the block times `inverse`."""
        gram = 0
        for piece in pieces():
            q = piece if inverse is None else piece @ library.asarray(inverse)
            gram = gram + q.conj().T @ q
        return np.linalg.cholesky(gram if library is np else library.asnumpy(gram)).conj().T

    try:
        first = factor(None)
        inverse = np.linalg.inv(first)
        if not np.linalg.norm(first) * np.linalg.norm(inverse) <= MOST_CONDITION:  # also if it is not a number
            return None
        second = factor(inverse)
    except np.linalg.LinAlgError:
        return None
    inverse = library.asarray(inverse @ np.linalg.inv(second))
    q = library.concatenate([(piece @ inverse).astype(block.dtype) for piece in pieces()])
    return q, library.asarray((second @ first).astype(block.dtype))


def stacked_r(factors: list[tuple[Any, Any]]) -> Any:
    """Return the R of several blocks, one below the other."""
    return np.concatenate([r for _, r in factors])


def rows_times(factors: tuple[Any, Any], stacked: Any, number: int, tasks: int) -> Any:
    """Return the product of a block's Q ``(m, n)`` and its n rows of a stack of small matrices, the `number`-th ones.

    So many `tasks` run side by side.
    """
    q, _ = factors
    n = q.shape[1]
    with shared_by(tasks):
        return q @ stacked[number * n : (number + 1) * n]

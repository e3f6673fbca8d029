"""QR and SVD of a tall and skinny matrix: its blocks and products by distmm, the small matrix in between by Dask."""

from __future__ import annotations

import operator

import dask.array as da

from distmm.accelerate import dask_names
from distmm.worker import tasks

__all__ = ["decomposed"]


def decomposed(data: da.Array, compute_svd: bool) -> tuple[da.Array, ...]:
    """Return Q and R, or U, S and Vh, of an array ``(m, n)`` with one column of blocks, each of n rows at least.

    Each block is ``A[i] = Q[i] R[i]``. The matrix of all R[i], one below the other, is ``Q' R`` or ``U' S Vh``, and
    ``Q[i] Q'[i]`` or ``Q[i] U'[i]`` is the block of the result: one product, where Dask takes two for U. Benson, Gleich
    and Demmel, Direct QR factorizations for tall-and-skinny matrices in MapReduce architectures, 2013.
    """
    (blocks, _), (_, n) = data.numblocks, data.shape
    same = {"dtype": data.dtype, "meta": data}
    factors = data.map_blocks(tasks.block_qr, tasks=blocks, **same)  # pairs, and no arrays
    q = factors.map_blocks(operator.itemgetter(0), **same)
    r = factors.map_blocks(operator.itemgetter(1), chunks=((n,) * blocks, (n,)), **same)
    # Blocks of the small matrix are about as tall as those of the large one: of many, Dask makes further steps.
    stacked = r.rechunk({0: max(2, max(data.chunks[0]) // n) * n})
    inner, *others = dask_names.original("tsqr")(stacked, compute_svd=compute_svd)
    outer = da.map_blocks(tasks.rows_times, q, inner.rechunk({0: n}), tasks=blocks, chunks=data.chunks, **same)
    return outer, *others

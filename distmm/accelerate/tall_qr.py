"""QR and SVD of a tall and skinny matrix: distmm computes blocks and products, Dask decomposes the small matrix."""

from __future__ import annotations

import operator

import dask.array as da

from distmm.accelerate import dask_names
from distmm.worker.tasks.tall_qr import block_qr, rows_times


def decomposed(data: da.Array, compute_svd: bool) -> tuple[da.Array, ...]:
    """Return Q and R, or U, S and Vh, of an array ``(m, n)`` with one column of blocks of at least n rows.

    Each block is ``A[i] = Q[i] R[i]``. The small matrix stacks all R[i] vertically; it is ``Q' R`` or ``U' S Vh``. A
    block of the result is ``Q[i] Q'[i]`` or ``Q[i] U'[i]``. That is one product; for U, Dask computes two. Source:
    Benson, Gleich and Demmel, Direct QR factorizations for tall-and-skinny matrices in MapReduce architectures, 2013.
    """
    (blocks, _), (_, n) = data.numblocks, data.shape
    same = {"dtype": data.dtype, "meta": data}
    factors = data.map_blocks(block_qr, tasks=blocks, **same)  # blocks are pairs (Q, R), not arrays
    q = factors.map_blocks(operator.itemgetter(0), **same)
    r = factors.map_blocks(operator.itemgetter(1), chunks=((n,) * blocks, (n,)), **same)
    # Blocks of the small matrix are about as tall as those of the large one. If there are several, Dask decomposes the
    # small matrix in the same way.
    stacked = r.rechunk({0: max(2, max(data.chunks[0]) // n) * n})
    inner, *others = dask_names.original("tsqr")(stacked, compute_svd=compute_svd)
    outer = da.map_blocks(rows_times, q, inner.rechunk({0: n}), tasks=blocks, chunks=data.chunks, **same)
    return outer, *others

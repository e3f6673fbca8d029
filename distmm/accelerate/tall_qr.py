"""QR and SVD of a tall and skinny matrix: distmm computes blocks and products, Dask decomposes the small matrix."""

from __future__ import annotations

import dask.array as da
from dask.highlevelgraph import HighLevelGraph

from distmm.accelerate import dask_names
from distmm.graph.dask_tasks import List, Task, TaskRef
from distmm.worker.tasks.tall_qr import block_qr, rows_times, stacked_r


def decomposed(data: da.Array, compute_svd: bool) -> tuple[da.Array, ...]:
    """Return Q and R, or U, S and Vh, of an array ``(m, n)`` with one column of blocks of at least n rows.

    Each block is ``A[i] = Q[i] R[i]``. The small matrix stacks all R[i] vertically; it is ``Q' R`` or ``U' S Vh``. A
    block of the result is ``Q[i] Q'[i]`` or ``Q[i] U'[i]``. That is one product; for U, Dask computes two. Source:
    Benson, Gleich and Demmel, Direct QR factorizations for tall-and-skinny matrices in MapReduce architectures, 2013.
    """
    (blocks, _), (_, n) = data.numblocks, data.shape
    factors = data.map_blocks(block_qr, tasks=blocks, dtype=data.dtype, meta=data)  # pairs (Q, R), not arrays
    pairs = [TaskRef((factors.name, i, 0)) for i in range(blocks)]
    # Blocks of the small matrix are about as tall as those of the large one. If there are several, Dask decomposes the
    # small matrix in the same way.
    most = max(2, max(data.chunks[0]) // n)
    groups = [pairs[first : first + most] for first in range(0, blocks, most)]
    name = f"distmm-stacked-{factors.name}"
    stacks = {(name, i, 0): Task((name, i, 0), stacked_r, List(*group)) for i, group in enumerate(groups)}
    graph = HighLevelGraph.from_collections(name, stacks, dependencies=[factors])
    small = da.Array(graph, name, (tuple(len(group) * n for group in groups), (n,)), meta=data)
    inner, *others = dask_names.original("tsqr")(small, compute_svd=compute_svd)
    name = f"distmm-outer-{inner.name}"
    products = {
        (name, i, 0): Task((name, i, 0), rows_times, pair, TaskRef((inner.name, i // most, 0)), i % most, blocks)
        for i, pair in enumerate(pairs)
    }
    graph = HighLevelGraph.from_collections(name, products, dependencies=[factors, inner])
    return da.Array(graph, name, data.chunks, meta=data), *others

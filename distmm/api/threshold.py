"""What is above a threshold in a product, as coordinates and values, without holding the product.

Workers pick elements from each block when it is made, and this process collects them wave by wave. A block of which too
much is kept returns a count instead of elements, and the call ends with all that has been counted by then. So neither
the workers' memory fills up, where at most two waves are under way, nor that of this process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from operator import index
from typing import Any, Literal, NamedTuple, SupportsIndex

import dask
import dask.array as da
import numpy as np
import psutil
from distributed import Client, Future, futures_of

from distmm.api.product import Gemm
from distmm.api.reduced_product import check_metric, check_ordered, norms_of, product_of
from distmm.api.scalars import check_scalars
from distmm.api.waves import Graph, Waves
from distmm.clusters import cluster
from distmm.errors import DoesNotFitError, InputError
from distmm.graph import reduction_graph
from distmm.graph.product_graph import Reduced
from distmm.planning.blocks import Wave, slices
from distmm.planning.plan import Plan
from distmm.planning.precision import Precision
from distmm.worker import tasks

__all__ = ["Entries", "bytes_of_entry", "check_threshold", "most_of_block", "threshold"]

# What is kept of a block takes at most this share of the block's own bytes, and of small blocks so many bytes: the plan
# leaves room for what is kept of two waves.
SHARE, ALWAYS = 1 / 4, 1 << 20

# Part of this process's free memory that the result may take by default: it is there twice while it is put together.
MOST = 1 / 4


class Entries(NamedTuple):
    """The elements of a product that were kept, by ascending row, and in a row by ascending column.

    SciPy's form is ``scipy.sparse.coo_array((values, (rows, columns)), shape=shape)``.

    Parameters
    ----------
    rows, columns : numpy.ndarray of int64, of shape (count,)
    values : numpy.ndarray of shape (count,)
    shape : tuple of int
        Of the product.
    """

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    shape: tuple[int, int]


def threshold(
    A: Any,
    B: Any,
    t: float,
    *,
    metric: Literal["inner", "cosine", "euclidean"] | None = None,
    most: int | None = None,
    transa: bool = False,
    transb: bool = False,
    precision: Precision | None = None,
    kernel: str | None = None,
    device: cluster.Device | None = None,
    blocks: tuple[int, ...] | None = None,
    plan: str | None = None,
    client: Client | None = None,
) -> Entries:
    """Compute ``A @ B`` now, and keep the elements that are at least `t`; the product is held nowhere.

    Parameters
    ----------
    A : array-like of shape (m, k)
        As in `matmul`; its elements are real numbers.
    B : array-like of shape (k, n), or None
        As `A`. None: the product is ``distmm.gram(A)``. Of each pair of rows (i, j) and (j, i) only the one with
        ``i >= j`` is returned, the diagonal included.
    t : scalar
        The threshold, in the type of the values; NaN is not kept.
    metric : {"inner", "cosine", "euclidean"}, optional
        What is compared and returned for a row of A and a column of B, as in `nearest`: the inner product, which is
        the element of the product and the default, the cosine, or the Euclidean distance. Distances of at most `t` are
        kept. With `transb`, columns of B are rows of the array that is given.
    most : int, optional
        Keep at most so many elements; by default as many as take a quarter of this machine's free memory.
    transa, transb, precision, kernel, device, blocks, plan, client
        As in `topk`.

    Returns
    -------
    Entries
        Rows, columns and values, in memory.

    Raises
    ------
    InputError
        As in `topk`; for batches, a `t` that is no real number, a negative distance, an unknown metric, and a metric of
        integers.
    DoesNotFitError
        If more than `most` elements are kept, or so many of one block that they would take more than a quarter of its
        memory; says how many were counted by then, in how many of all elements. Nothing is left on the workers.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B = np.array([[1.0], [-1.0]]), np.array([[3.0, 1.0, -2.0]])
    >>> found = distmm.threshold(A, B, 2)
    >>> found.rows, found.columns, found.values
    (array([0, 1]), array([0, 2]), array([3., 2.]))
    >>> X, Y = np.array([[0.0, 0.0]]), np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    >>> near = distmm.threshold(X, Y, 2, metric="euclidean", transb=True)
    >>> near.columns, near.values
    (array([1, 2]), array([1., 2.]))
    """
    product, wishes = product_of(A, B, transa, transb, (precision, kernel, device, blocks, plan))
    check_ordered(product, "threshold")
    if len(product.shape) != 2:
        raise InputError(f"the product has shape {product.shape}: threshold takes one product of matrices")
    check_threshold(t, most, metric)
    dtype = product.dtype
    if metric is not None:
        check_metric(metric, product.a, product.b)
        dtype = tasks.score_dtype(metric, dtype)
    client = cluster.usable(client)
    if client is None:
        cluster.refuse_asynchronous()
    each = bytes_of_entry(dtype)
    limit = int(psutil.virtual_memory().available * MOST) // each if most is None else index(most)

    def of_block(plan: Plan) -> int:
        """Elements that are kept of a block at most."""
        return min(limit, most_of_block(plan, dtype, ALWAYS))

    def of_waves(plan: Plan) -> int:
        """Bytes that are kept of the two waves that are under way at a time, at most."""
        return 2 * max(wave.c_blocks for wave in plan.waves) * of_block(plan) * each

    made = product.reduced(wishes, of_waves, client)
    collected = _Collected(product, made, limit)
    exact = t.item() if isinstance(t, np.generic) else t
    _compute(product, made, tasks.Threshold(exact, of_block(made), metric=metric), collected, client)
    return collected.result()


def check_threshold(t: Any, most: Any, metric: str | None) -> None:
    """Refuse a threshold that is not a real number, a negative distance, and a limit that is not a count of elements.

    Raises
    ------
    InputError
    """
    check_scalars(t=t)
    if isinstance(t, (complex, np.complexfloating)) or t != t:
        raise InputError(f"t is {t!r}: give a real number")
    try:
        float(t)
    except OverflowError:
        raise InputError(
            f"t is an integer of {t.bit_length()} bits, beyond all types of elements: give one below 1.7e308"
        ) from None
    if metric == "euclidean" and t < 0:
        raise InputError(f"t is {t!r}, and no Euclidean distance is negative: give 0 or more")
    if most is not None and (not isinstance(most, SupportsIndex) or index(most) < 0):
        raise InputError(f"most is {most!r}: give a whole number, how many elements to keep at most")


def bytes_of_entry(dtype: np.dtype[Any]) -> int:
    """Bytes of the row, the column and the value of an element of this type."""
    return 2 * np.dtype(np.int64).itemsize + dtype.itemsize


def most_of_block(plan: Plan, dtype: np.dtype[Any], always: int) -> int:
    """Elements of type `dtype` that are kept of a block at most; so many bytes of a small one `always`."""
    each, elements = bytes_of_entry(dtype), math.prod(plan.block_shape[::2])
    return int(max(elements * dtype.itemsize * SHARE, min(always, elements * each))) // each


def _compute(
    product: Gemm, plan: Plan, reduction: tasks.Threshold, collected: _Collected, client: Client | None
) -> None:
    """Compute the product wave by wave, and collect what is kept of each block."""
    kind: Literal["numpy", "cupy"] = "cupy" if plan.cluster.device == "cuda" else "numpy"
    norms: tuple[da.Array, ...] = ()
    if reduction.metric not in (None, "inner"):  # once here, not once for each wave
        lazy = norms_of(product, plan, client)
        norms = tuple(dask.persist(*lazy) if client is None else client.persist(list(lazy)))
    names = (norms[0].name, norms[1].name) if norms else None
    graph = product.graphs(plan, kind, client, Reduced(reduction, norms=names, mirrored=False), norms)
    if client is None:
        for wave in plan.waves:
            parts = reduction_graph.parts_of_blocks(*graph(wave), plan, wave)
            for (i, j), part in zip(parts, dask.compute(*parts.values()), strict=True):
                collected.add(i, j, part)
        return
    blocks: dict[Any, tuple[int, int]] = {}  # of the tasks in flight, by key

    def send(on: Client, wave: Wave) -> tuple[list[Future], float]:
        parts = reduction_graph.parts_of_blocks(*graph(wave), plan, wave)
        futures = futures_of(on.persist(list(parts.values())))
        blocks.update({part.key: (i, j) for (i, j), part in parts.items()})
        return futures, math.inf

    def take(future: Future) -> None:
        collected.add(*blocks.pop(future.key), future.result())

    waves: Iterator[Graph] = (partial(send, client, wave) for wave in plan.waves)
    Waves(client, take).run(waves)


class _Collected:
    """What has been kept so far, by block."""

    def __init__(self, product: Gemm, plan: Plan, most: int) -> None:
        self.product, self.most, self.count, self.seen = product, most, 0, 0
        self.rows, self.columns = slices(plan.blocking.m), slices(plan.blocking.n)
        self.lines: dict[int, dict[int, tuple[np.ndarray, ...]]] = {i: {} for i in range(len(self.rows))}

    def add(self, i: int, j: int, part: tuple[int, Any, Any, Any]) -> None:
        """Add what is kept of one block.

        Raises
        ------
        DoesNotFitError
            If it is too much.
        """
        rows, columns = self.rows[i], self.columns[j]
        size = (rows.stop - rows.start) * (columns.stop - columns.start)
        count, row, column, values = part
        self.seen += size
        self.count += count
        if row is None or self.count > self.most:
            whole = math.prod(self.product.shape)
            why = f"and at most {self.most:,} fit"
            if self.count <= self.most:
                why = f"and those of one block, {count:,} of {size:,}, would take more than a quarter of its memory"
            raise DoesNotFitError(
                f"the threshold keeps {self.count:,} of the {self.seen:,} elements seen so far, of {whole:,}, {why}: "
                "raise the threshold, or compute all with distmm.matmul and out="
            )
        row += rows.start
        if self.product.symmetry is not None and i == j:  # one of each pair
            lower = column <= row
            row, column, values = row[lower], column[lower], values[lower]
        self.lines[i][j] = row, column, values

    def result(self) -> Entries:
        """Return all that is kept, in the order of rows and columns."""
        ordered = [self._line(parts) for parts in self.lines.values() if parts]
        rows, columns, values = (np.concatenate(each) for each in zip(*ordered, strict=True))
        m, n = self.product.shape
        return Entries(rows, columns, values, (m, n))

    def _line(self, parts: dict[int, tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
        """Put the blocks of one row of blocks together."""
        row, column, values = (np.concatenate(each) for each in zip(*(parts[j] for j in sorted(parts)), strict=True))
        order = np.argsort(row, kind="stable")
        return row[order], column[order], values[order]

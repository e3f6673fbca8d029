"""What users want of C when they do not want C: the best k of each row, the nearest rows, sums, norms, histograms.

Each block of C is reduced by the task that finishes it, so that C is never in memory as a whole, and never travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index
from typing import Any, Literal, NamedTuple, SupportsIndex, cast

import dask.array as da
import numpy as np
from distributed import Client

from distmm.api.array import square, with_itself
from distmm.api.operands import Operand, check_pair, wrap
from distmm.api.plan_request import Wishes
from distmm.api.product import Gemm
from distmm.clusters import cluster
from distmm.errors import InputError
from distmm.graph import reduction_graph
from distmm.graph.product_graph import Reduced
from distmm.planning.plan import Plan
from distmm.planning.precision import Precision
from distmm.planning.problem import Symmetry
from distmm.worker import tasks

__all__ = ["TopK", "nearest", "reduce", "topk"]

Kinds = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
Functions = tuple[Callable[[Any, int], Any], Callable[[list[Any]], Any], Callable[[Any], Any]]

REDUCTIONS = ("max", "argmax", "sum", "norm", "histogram")

# Bytes of a piece of an operand whose norms a task computes.
NORMS_PIECE = 32 << 20


class TopK(NamedTuple):
    """The best elements of each row, in order. Both arrays are lazy; ``dask.compute(*result)`` computes them together.

    Attributes
    ----------
    values : dask.array.Array of shape (..., m, k)
    indices : dask.array.Array of int64, of shape (..., m, k)
        Columns of C, or rows of Y.
    """

    values: da.Array
    indices: da.Array


def topk(
    A: Any,
    B: Any,
    k: int,
    *,
    transa: bool = False,
    transb: bool = False,
    precision: Precision | None = None,
    kernel: str | None = None,
    device: cluster.Device | None = None,
    blocks: tuple[int, ...] | None = None,
    plan: str | None = None,
    client: Client | None = None,
) -> TopK:
    """Find the k largest elements of each row of ``A @ B``, and their columns, without holding the product.

    Each block of the product is reduced to its k largest elements of each row by the task that finishes it.

    Parameters
    ----------
    A : array-like of shape (..., m, k)
        As in `matmul`; its elements are real numbers.
    B : array-like of shape (..., k, n), or None
        As `A`. None: the product is ``distmm.gram(A)``, which multiplies each pair of rows once.
    k : int
        How many, from 1 to n.
    transa, transb : bool
        As in `gemm`. Without `B`, `transa` is the `trans` of `gram`.
    precision, kernel, device, blocks, client
        As in `matmul`; `blocks` as in `gram` without `B`.
    plan : str, optional
        The text of a plan.

    Returns
    -------
    TopK
        Lazy values and indices, NumPy arrays of shape (..., m, k) when computed. The largest element comes first; of
        equal ones the one in the lower column, whatever the blocks and the workers. The order is that of `numpy.sort`:
        NaN is larger than any number.

    Raises
    ------
    InputError
        As in `matmul`; for vectors, for complex numbers, which have no order, and for a `k` that is not from 1 to n.
    DoesNotFitError
        If the workers lack the memory for blocks and results; names the missing figure.

    See Also
    --------
    nearest : The best by the cosine or the Euclidean distance.

    Examples
    --------
    >>> import dask, numpy as np, distmm
    >>> A, B = np.array([[1.0], [-1.0]]), np.array([[3.0, 1.0, 2.0, 3.0]])
    >>> values, indices = dask.compute(*distmm.topk(A, B, 2))
    >>> values
    array([[ 3.,  3.],
           [-1., -2.]])
    >>> indices
    array([[0, 3],
           [1, 2]])
    """
    product, wishes = product_of(A, B, transa, transb, (precision, kernel, device, blocks, plan))
    check_ordered(product, "largest elements")
    k = _checked_k(k, product.shape[-1], "the product has rows of {n} elements")
    kinds = [(product.dtype, (k,)), (np.dtype(np.int64), (k,))]
    return TopK(*_lazy(product, wishes, tasks.Largest(k, product.dtype), kinds, client))


def nearest(
    X: Any,
    Y: Any,
    k: int,
    metric: Literal["inner", "cosine", "euclidean"] = "inner",
    *,
    precision: Precision | None = None,
    kernel: str | None = None,
    device: cluster.Device | None = None,
    blocks: tuple[int, ...] | None = None,
    plan: str | None = None,
    client: Client | None = None,
) -> TopK:
    """Find the k rows of Y that are nearest to each row of X, exactly: by the product of X with the transpose of Y.

    Norms are computed once, block by block, and folded into the reduction of each block of the product.

    Parameters
    ----------
    X : array-like of shape (m, d)
        As `A` in `matmul`; floating-point numbers.
    Y : array-like of shape (n, d), or None
        As `X`. None: X itself. Each pair of rows is then multiplied once, and each row is one of its own neighbours.
    k : int
        How many, from 1 to n.
    metric : {"inner", "cosine", "euclidean"}
        "inner": the inner product, largest first. "cosine": the inner product divided by both norms, largest first; a
        row of zeros has the cosine 0 with all others. "euclidean": the distance, smallest first, as the square root of
        ``|x|^2 + |y|^2 - 2 x @ y``: where a distance is much smaller than the norms, few of its digits are right.
    precision, kernel, device, blocks, plan, client
        As in `topk`.

    Returns
    -------
    TopK
        Lazy values (inner products, cosines or distances) and indices of rows of Y, NumPy arrays of shape (m, k) when
        computed. Of equally near rows the one with the lower index comes first. A row of Y with NaN is farther than all
        others: its inner product and cosine count as minus infinity, its distance as infinity.

    Raises
    ------
    InputError
        As in `topk`; for integers, whose products may wrap around, for an unknown metric, and for X and Y of different
        widths.
    DoesNotFitError
        As in `topk`.

    Examples
    --------
    >>> import dask, numpy as np, distmm
    >>> X, Y = np.array([[0.0, 0.0]]), np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    >>> distances, indices = dask.compute(*distmm.nearest(X, Y, 2, "euclidean"))
    >>> distances, indices
    (array([[1., 2.]]), array([[1, 2]]))
    """
    if metric not in tasks.METRICS:
        raise InputError(f"metric {metric!r} is not one of {', '.join(tasks.METRICS)}")
    product, wishes = _of_rows(X, Y, (precision, kernel, device, blocks, plan))
    k = _checked_k(k, product.shape[-1], f"{'X' if Y is None else 'Y'} has {{n}} rows")
    dtype = tasks.score_dtype(metric, product.dtype)
    kinds = [(dtype, (k,)), (np.dtype(np.int64), (k,))]
    return TopK(*_lazy(product, wishes, tasks.Largest(k, dtype, metric), kinds, client, norms=metric != "inner"))


def reduce(
    A: Any,
    B: Any,
    how: str | Functions,
    *,
    axis: int = -1,
    bins: Sequence[float] | np.ndarray | None = None,
    dtype: Any = None,
    shape: tuple[int, ...] = (),
    transa: bool = False,
    transb: bool = False,
    precision: Precision | None = None,
    kernel: str | None = None,
    device: cluster.Device | None = None,
    blocks: tuple[int, ...] | None = None,
    plan: str | None = None,
    client: Client | None = None,
) -> da.Array:
    r"""Reduce each row, or each column, of ``A @ B`` without holding the product.

    Parameters
    ----------
    A, B : array-like
        As in `topk`; complex numbers too, where they need no order.
    how : {"max", "argmax", "sum", "norm", "histogram"} or tuple of three functions
        "max" and "argmax": as in NumPy, NaN first; of equal elements the first. "sum": of floating-point numbers in
        float64, of integers in NumPy's type. "norm": the Euclidean norm, squares summed in float64. "histogram": counts
        in `bins`.

        Three functions ``(chunk, combine, finish)`` of your own: ``chunk(block, first)`` reduces a block of shape
        (..., r, c), a NumPy or CuPy array, to a part; ``block[..., 0]`` is element `first` of r lines. A part is an
        array, or a tuple of arrays, of shape (..., r, ...). ``combine(parts)`` makes one part of a list of parts of the
        same lines, which are in order. ``finish(part)`` makes the results of whole lines, of shape (..., r, \*shape).
    axis : {-1, -2}
        Along which elements are reduced: -1 gives a result for each row, -2 for each column; 1 and 0 for matrices.
    bins : array-like, optional
        Ascending edges of the bins of a histogram, as in `numpy.histogram`.
    dtype : data-type, optional
        Of the results of your own functions; by default that of the product.
    shape : tuple of int, optional
        Of the result of one line by your own functions.
    transa, transb, precision, kernel, device, blocks, plan, client
        As in `topk`.

    Returns
    -------
    dask.array.Array of shape (..., m) or (..., n), with that of a line's result at the end
        Lazy. Sums and norms have the same bits for any number of workers where the blocks are the same; the other
        results do not depend on blocks.

    Raises
    ------
    InputError
        As in `topk`; for a `how`, an `axis` or `bins` that are none of those above.
    DoesNotFitError
        As in `topk`.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B = np.array([[1.0], [-1.0]]), np.array([[3.0, 1.0, 2.0]])
    >>> distmm.reduce(A, B, "sum").compute()
    array([ 6., -6.])
    >>> distmm.reduce(A, B, "argmax").compute()
    array([0, 1])
    >>> least = (lambda c, first: c.min(axis=-1)), (lambda parts: np.minimum.reduce(parts)), (lambda part: part)
    >>> distmm.reduce(A, B, least, axis=0).compute()
    array([-3., -1., -2.])
    """
    product, wishes = product_of(A, B, transa, transb, (precision, kernel, device, blocks, plan))
    ndim, c = len(product.shape), product.dtype
    if not isinstance(axis, SupportsIndex) or index(axis) not in (-1, -2, ndim - 1, ndim - 2):
        raise InputError(f"axis is {axis!r}: give -1 for a result of each row of the product, -2 for each column")
    down = index(axis) in (-2, ndim - 2)
    if product.shape[-2 if down else -1] == 0:
        raise InputError(f"the product has shape {product.shape}: there is nothing to reduce along axis {axis}")
    _check_belongs(how, bins, dtype, shape)
    if how in ("max", "argmax"):
        check_ordered(product, "largest element")
        kinds: Kinds = [(c, (1,)), (np.dtype(np.int64), (1,))]
        best = _lazy(product, wishes, tasks.Largest(1, c), kinds, client, down)
        return best[0 if how == "max" else 1][..., 0]
    if how == "sum":
        of_sum = np.dtype(np.uint64 if c.kind == "u" else np.int64) if c.kind in "biu" else c
        return _lazy(product, wishes, tasks.Sum(of_sum), [(of_sum, ())], client, down)[0]
    if how == "norm":
        of_norm = np.dtype(np.float64) if c.kind in "biu" else np.empty(0, c).real.dtype
        return _lazy(product, wishes, tasks.Norm(of_norm), [(of_norm, ())], client, down)[0]
    if how == "histogram":
        check_ordered(product, "bins")
        edges = _checked_bins(bins)
        kinds = [(np.dtype(np.int64), (len(edges) - 1,))]
        return _lazy(product, wishes, tasks.Histogram(tuple(edges.tolist())), kinds, client, down)[0]
    own = c if dtype is None else np.dtype(dtype)
    return _lazy(product, wishes, tasks.Custom(cast("Functions", how), own), [(own, tuple(shape))], client, down)[0]


def product_of(A: Any, B: Any, transa: bool, transb: bool, how: tuple[Any, ...]) -> tuple[Gemm, Wishes]:
    """Return the product of two operands, or of one with itself, that is to be reduced.

    Raises
    ------
    InputError
    """
    precision, kernel, device, blocks, plan = how
    symmetry: Symmetry | None = None
    if B is None:
        a, b, symmetry = with_itself(A, transa, hermitian=True)
        blocks = square(blocks)
    else:
        a, b = wrap(A, "A", transa), wrap(B, "B", transb)
        check_pair(a, b)
    for operand in (a, b):
        if len(operand.shape) < 2:
            raise InputError(f"{operand.name} has shape {operand.shape}: what is reduced is a product of matrices")
    product = Gemm.of(a, b, symmetry=symmetry)
    if 0 in product.shape[:-2]:
        raise InputError(f"the product has shape {product.shape}: there is nothing to reduce")
    return product, Wishes.chosen(precision, kernel, device, blocks, plan)


def check_ordered(product: Gemm, wanted: str) -> None:
    """Refuse a product of complex numbers.

    Raises
    ------
    InputError
    """
    if product.dtype.kind == "c":
        raise InputError(f"the product is {product.dtype}, and complex numbers have no order, so no {wanted}")


def _of_rows(X: Any, Y: Any, how: tuple[Any, ...]) -> tuple[Gemm, Wishes]:
    """Return the product of X with the transpose of Y, or of X."""
    precision, kernel, device, blocks, plan = how
    operands = [wrap(X, "X")] if Y is None else [wrap(X, "X"), wrap(Y, "Y")]
    for x in operands:
        if len(x.shape) != 2:
            raise InputError(f"{x.name} has shape {x.shape}: give a matrix, one row for each point")
        if x.dtype.kind in "biuc":
            raise InputError(f"{x.name} is {x.dtype}: give real floating-point numbers, as {x.name}.astype('float32')")
    x, y = operands[0], operands[-1]
    if x.shape[1] != y.shape[1]:
        raise InputError(f"X has shape {x.shape} and Y {y.shape}: their rows must be of one length")
    b = replace(y, transposed=True)
    check_pair(x, b)
    product = Gemm.of(x, b, symmetry="symmetric" if Y is None else None)
    return product, Wishes.chosen(precision, kernel, device, square(blocks) if Y is None else blocks, plan)


def _checked_k(k: Any, n: int, what: str) -> int:
    if not isinstance(k, SupportsIndex) or isinstance(k, (bool, np.bool_)) or not 1 <= index(k) <= n:
        raise InputError(f"k is {k!r}, and {what.format(n=n)}: give a whole number from 1 to {n}")
    return index(k)


def _check_belongs(how: Any, bins: Any, dtype: Any, shape: Any) -> None:
    """Refuse arguments that do not belong together."""
    own = isinstance(how, tuple) and len(how) == 3 and all(map(callable, how))
    if not own and (not isinstance(how, str) or how not in REDUCTIONS):
        raise InputError(
            f"how is {how!r}: give one of {', '.join(REDUCTIONS)}, or three functions (chunk, combine, finish)"
        )
    if (bins is None) == (how == "histogram"):
        raise InputError(f"how is {how!r} and bins {bins!r}: give the edges of bins for a histogram, and only for one")
    if not own and (dtype is not None or tuple(shape)):
        raise InputError(
            f"how is {how!r}, and dtype {dtype!r} and shape {shape!r} belong to functions of your own: leave them out"
        )


def _checked_bins(bins: Any) -> np.ndarray:
    edges = np.asarray(bins)
    if edges.ndim != 1 or len(edges) < 2 or edges.dtype.kind not in "biuf" or not (edges[1:] >= edges[:-1]).all():
        raise InputError(f"bins are {bins!r}: give at least two edges in ascending order")
    return edges


def _lazy(
    product: Gemm,
    wishes: Wishes,
    reduction: tasks.Reduction,
    kinds: Kinds,
    client: Client | None,
    down: bool = False,
    norms: bool = False,
) -> list[da.Array]:
    """Plan the product and return the results of its reduction; see `reduction_graph.results`."""
    client = cluster.usable(client)
    *batch, m, n = product.shape
    of_line = sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds)
    nbytes = math.prod(batch) * (n if down else m) * of_line

    def kept(plan: Plan) -> int:
        """Bytes of the results, and of the parts of a wave: its blocks may all be finished before any are merged."""
        height, _, width = plan.block_shape
        height, width = (width, height) if down else (height, width)
        share = min(1.0, width / reduction.k) if isinstance(reduction, tasks.Largest) else 1.0
        blocks = max(wave.c_blocks for wave in plan.waves) * (1 if product.symmetry is None else 2)
        return nbytes + blocks * math.prod(map(max, plan.blocking.batch)) * math.ceil(height * of_line * share)

    plan = product.reduced(wishes, kept, client, shared=norms)
    on_rows: list[da.Array] = []
    if norms:
        a, b = product.a, replace(product.b, transposed=False)
        on_rows = [_squares(a, plan.blocking.m, client)]
        on_rows.append(on_rows[0] if product.symmetry else _squares(b, plan.blocking.n, client))
    names = (on_rows[0].name, on_rows[1].name) if on_rows else None
    reduced = Reduced(reduction, down, names)
    kind: Literal["numpy", "cupy"] = "cupy" if plan.cluster.device == "cuda" else "numpy"
    name, graph = product.graphs(plan, kind, client, reduced, tuple(on_rows))(None)
    return reduction_graph.results(name, graph, plan, reduced, kinds)


def _squares(x: Operand, edges: tuple[int, ...], client: Client | None) -> da.Array:
    """Return the squared norms of the rows of X, lazy, cut at `edges`."""
    chunks = x.chunks
    if chunks is None:
        chunks = da.core.normalize_chunks("auto", x.shape, limit=NORMS_PIECE, dtype=x.dtype)
    blocks = x.blocked(chunks, "cpu", client)
    across = (1,) * len(chunks[1])
    norms = blocks.map_blocks(tasks.squared_norms, chunks=(chunks[0], across), dtype="f8", meta=np.empty((0, 0)))
    return norms.sum(axis=1).rechunk((edges,), method="tasks")

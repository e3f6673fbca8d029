"""The public functions `topk`, `nearest` and `reduce`: the best k of each row, sums, histograms, one's own reductions.

The task that finishes a block of C reduces it. C is never in memory as a whole, and its blocks are never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Unpack, cast

import dask
import dask.array as da
import numpy as np

from distmm.errors import InputError
from distmm.graph.parametric_layer import with_copies
from distmm.planning.problem import accumulator_dtype
from distmm.product.choices import BlockKeywords, takes
from distmm.product.product_array import ProductArray
from distmm.product.reduced_product import product_of, results
from distmm.product.reduction_limits import check_metric, check_ordered, checked_k
from distmm.units import whole
from distmm.worker.tasks.reductions import Custom, Largest, histogram, norms, sums

Functions = tuple[Callable[[Any, int], Any], Callable[[list[Any]], Any], Callable[[Any], Any]]

REDUCTIONS = ("max", "argmax", "sum", "norm", "histogram")


class TopK(NamedTuple):
    """The best elements of each row, best first. Both arrays are lazy: `compute` computes both at once.

    Parameters
    ----------
    values : dask.array.Array of shape (..., m, k)
    indices : dask.array.Array of int64, of shape (..., m, k)
        Columns of C, or rows of Y.
    """

    values: da.Array
    indices: da.Array

    def compute(self) -> tuple[np.ndarray, np.ndarray]:
        """Return values and indices as NumPy arrays, from one computation of the product.

        ``dask.compute(*result)`` returns the same. Here, workers on this process's machine write directly into the
        arrays, while Dask sends all results through the scheduler.
        """
        values, indices = (ProductArray.of(array).compute() for array in dask.persist(*self))
        return values, indices


@takes(BlockKeywords)
def topk(
    A: Any, B: Any, k: int, *, transa: bool = False, transb: bool = False, **choices: Unpack[BlockKeywords]
) -> TopK:
    """Find the k largest elements of each row of ``A @ B``, and their columns, without storing the product.

    The task that finishes a block of the product reduces it to the k largest elements of each row.

    Parameters
    ----------
    A : array-like of shape (..., m, k)
        As in `matmul`. Its elements must be real numbers.
    B : array-like of shape (..., k, n), or None
        As `A`. None: the product is ``distmm.gram(A)``, which multiplies each pair of rows once. So does a B that is
        the transpose of A (``A.T``, or A itself with `transb`), unless `blocks` or `plan` are given.
    k : int
        Number of elements of each row, from 1 to n.
    transa, transb : bool
        As in `gemm`. Without `B`, `transa` is the `trans` of `gram`.
    precision, kernel, reproducible, device, client, blocks, plan
        As in `matmul`; `blocks` as in `gram` without `B`.

    Returns
    -------
    TopK
        Lazy values and indices. They compute to NumPy arrays of shape (..., m, k). The largest element comes first. Of
        equal elements, the one in the lower column comes first, for any blocks and workers. NaN counts as larger than
        any number, as in `numpy.sort`.

    Raises
    ------
    InputError
        As in `matmul`. Also for vectors, for complex numbers, which have no order, and for a `k` that is not from 1
        to n.
    DoesNotFitError
        If the workers have too little memory for blocks and results. The error says how much is missing.

    See Also
    --------
    nearest : The best by the cosine or the Euclidean distance.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B = np.array([[1.0], [-1.0]]), np.array([[3.0, 1.0, 2.0, 3.0]])
    >>> values, indices = distmm.topk(A, B, 2).compute()
    >>> values
    array([[ 3.,  3.],
           [-1., -2.]])
    >>> indices
    array([[0, 3],
           [1, 2]])
    """
    product, chosen = product_of(A, B, transa, transb, **choices)
    check_ordered(product.dtype, "largest elements")
    k = checked_k(k, product.shape[-1], "the product has rows of {n} elements")
    return TopK(*results(product, chosen, Largest(k, product.dtype)))


@takes(BlockKeywords)
def nearest(
    X: Any, Y: Any, k: int, metric: Literal["inner", "cosine", "euclidean"] = "inner", **choices: Unpack[BlockKeywords]
) -> TopK:
    """Find the k rows of Y that are nearest to each row of X, by an exact search: the product ``X @ Y.T``.

    The product is never stored. Norms are computed once, and the reduction of each block of the product uses them.

    Parameters
    ----------
    X : array-like of shape (m, d)
        As `A` in `matmul`. Floating-point numbers.
    Y : array-like of shape (n, d), or None
        As `X`. None: X itself. Each pair of rows is then multiplied once, and each row counts as its own neighbour.
    k : int
        Number of neighbours, from 1 to n.
    metric : {"inner", "cosine", "euclidean"}
        "inner": the inner product, largest first. "cosine": the inner product divided by both norms, largest first. A
        row of zeros has the cosine 0 with all others. "euclidean": the distance, smallest first, computed as the square
        root of ``|x|^2 + |y|^2 - 2 x @ y``. A distance that is much smaller than the norms has few correct digits.
    precision, kernel, reproducible, device, client, blocks, plan
        As in `topk`.

    Returns
    -------
    TopK
        Lazy values (inner products, cosines or distances) and indices of rows of Y. They compute to NumPy arrays of
        shape (m, k). Values of float16 and bfloat16 are float32. Cosines and distances do not overflow where float64
        would not; inner products of float32 do, as those of `matmul`. Of equally near rows, the one with the lower
        index comes first. A row of Y with NaN comes last: its inner product and cosine count as minus infinity, its
        distance as infinity.

    Raises
    ------
    InputError
        As in `topk`. Also for integers, whose products may wrap around, for an unknown metric, and for X and Y of
        different widths.
    DoesNotFitError
        As in `topk`.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> X, Y = np.array([[0.0, 0.0]]), np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    >>> distances, indices = distmm.nearest(X, Y, 2, "euclidean").compute()
    >>> distances, indices
    (array([[1., 2.]]), array([[1, 2]]))
    """
    product, chosen = product_of(X, Y, False, Y is not None, ("X", "Y"), **choices)
    if len(product.shape) != 2:
        raise InputError(f"X @ Y.T has shape {product.shape}: give two matrices, one row for each point")
    check_metric(metric, product.a, product.b)
    k = checked_k(k, product.shape[-1], f"{'X' if Y is None else 'Y'} has {{n}} rows")
    return TopK(*results(product, chosen, Largest(k, accumulator_dtype(product.dtype), metric)))


@takes(BlockKeywords)
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
    **choices: Unpack[BlockKeywords],
) -> da.Array:
    r"""Reduce each row, or each column, of ``A @ B`` without storing the product.

    Parameters
    ----------
    A, B : array-like
        As in `topk`. "sum", "norm" and your own functions also take complex numbers.
    how : {"max", "argmax", "sum", "norm", "histogram"} or tuple of three functions
        "max" and "argmax": as in NumPy. NaN counts as the largest, and the first of equal elements wins. "sum":
        floating-point numbers are summed in float64, integers in NumPy's type. "norm": the Euclidean norm, with squares
        summed in float64. "histogram": counts of the elements in each of `bins`.

        Or three functions ``(chunk, combine, finish)`` of your own. A line is a row of the product, or a column with
        ``axis=-2``. ``chunk(block, first)`` reduces a block of shape (..., r, c), a NumPy or CuPy array with r lines,
        to a part; ``block[..., 0]`` is element `first` of each line. A part is an array, or a tuple of arrays, of shape
        (..., r, ...). ``combine(parts)`` makes one part from a list of parts of the same lines, sorted along the lines.
        ``finish(part)`` makes the results of whole lines, of shape (..., r, \*shape).
    axis : {-1, -2}
        The axis that is reduced: -1 gives one result for each row, -2 one for each column. For matrices also 1 and 0.
    bins : array-like, optional
        Ascending edges of the bins of a histogram, as in `numpy.histogram`.
    dtype : data-type, optional
        Type of the results of your own functions. By default the type of the product.
    shape : tuple of int, optional
        Shape of the result of your own functions for one line.
    transa, transb, precision, kernel, reproducible, device, client, blocks, plan
        As in `topk`.

    Returns
    -------
    dask.array.Array of shape (..., m) or (..., n), followed by the shape of a line's result
        Lazy. Sums and norms have the same bits for any number of workers if the blocks are the same. The other built-in
        results do not depend on the blocks.

    Raises
    ------
    InputError
        As in `topk`. Also for a `how`, an `axis` or `bins` with a value that is not listed above.
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
    product, chosen = product_of(A, B, transa, transb, **choices)
    ndim, c = len(product.shape), product.dtype
    if (at := whole(axis)) not in (-1, -2, ndim - 1, ndim - 2):
        raise InputError(f"axis is {axis!r}: give -1 for a result of each row of the product, -2 for each column")
    down = at in (-2, ndim - 2)
    if product.shape[-2 if down else -1] == 0:
        raise InputError(f"the product has shape {product.shape}: there is nothing to reduce along axis {axis}")
    _check_belongs(how, bins, dtype, shape)
    if how in ("max", "argmax"):
        check_ordered(product.dtype, "largest element")
        best = results(product, chosen, Largest(1, c), down)
        return with_copies(best[0 if how == "max" else 1][..., 0])
    if how == "sum":
        of_sum = np.dtype(np.uint64 if c.kind == "u" else np.int64) if c.kind in "biu" else c
        return results(product, chosen, sums(of_sum), down)[0]
    if how == "norm":
        of_norm = np.dtype(np.float64) if c.kind in "biu" else np.empty(0, c).real.dtype
        return results(product, chosen, norms(of_norm), down)[0]
    if how == "histogram":
        check_ordered(product.dtype, "bins")
        edges = _checked_bins(bins)
        return results(product, chosen, histogram(tuple(edges.tolist())), down)[0]
    own = c if dtype is None else np.dtype(dtype)
    return results(product, chosen, Custom(cast("Functions", how), own, tuple(shape)), down)[0]


def _check_belongs(how: Any, bins: Any, dtype: Any, shape: Any) -> None:
    """Refuse an unknown `how`, and arguments that do not apply to it."""
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

"""The public function `threshold`: the elements of a product above a threshold, without storing the product."""

from __future__ import annotations

from typing import Any, Literal, Unpack

from distmm.product.choices import BlockKeywords, takes
from distmm.product.reduced_product import product_of
from distmm.product.thresholds import Entries, above

__all__ = ["Entries", "threshold"]


@takes(BlockKeywords)
def threshold(
    A: Any,
    B: Any,
    t: float,
    *,
    metric: Literal["inner", "cosine", "euclidean"] | None = None,
    most: int | None = None,
    transa: bool = False,
    transb: bool = False,
    **choices: Unpack[BlockKeywords],
) -> Entries:
    """Compute ``A @ B`` at the call, and keep the elements that are at least `t`. The product is never stored.

    Parameters
    ----------
    A : array-like of shape (m, k)
        As in `matmul`. Its elements must be real numbers.
    B : array-like of shape (k, n), or None
        As `A`. None: the product is ``distmm.gram(A)``, which is symmetric. Only its elements (i, j) with ``i >= j``
        are returned.
    t : scalar
        The threshold, in the type of the values. NaN is not kept.
    metric : {"inner", "cosine", "euclidean"}, optional
        The value that is compared and returned for a row of A and a column of B, as in `nearest`: the inner product
        (the default: the element of the product), the cosine, or the Euclidean distance. Distances of at most `t` are
        kept. With `transb`, the columns of B are the rows of the array that you give. Values of float16 and bfloat16
        are float32.
    most : int, optional
        Number of elements that may be kept. By default, as many as fit into a quarter of this machine's free memory.
    transa, transb, precision, kernel, reproducible, device, client, blocks, plan
        As in `topk`.

    Returns
    -------
    Entries
        Rows, columns and values, in memory.

    Raises
    ------
    InputError
        As in `topk`. Also for batches, for a `t` that is not a real number, for a negative distance, for an unknown
        metric, and for integers with a metric.
    DoesNotFitError
        If more than `most` elements are kept, or if those of one block would take more than a quarter of the block's
        memory. The error says how many elements were kept, and how many were examined. All tasks are cancelled, and
        their memory is freed.

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
    product, chosen = product_of(A, B, transa, transb, now=True, **choices)
    return above(t, product, chosen, metric, most, lower=B is None)

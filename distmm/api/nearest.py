"""The public function `nearest`: the nearest rows of one matrix to each row of another, by a product."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import numpy as np

from distmm.api.reductions import TopK
from distmm.errors import InputError
from distmm.planning.problem import accumulator_dtype
from distmm.product.choices import BlockKeywords, takes
from distmm.product.reduced_product import product_of, results
from distmm.product.reduction_limits import check_metric, checked_k
from distmm.worker.tasks.reductions import Largest


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
    dtype = accumulator_dtype(product.dtype)
    kinds = [(dtype, (k,)), (np.dtype(np.int64), (k,))]
    reduction = Largest(k, dtype, metric)
    return TopK(*results(product, chosen, reduction, kinds))

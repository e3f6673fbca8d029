"""What makes neighbours near: a score of inner products, folded into the reduction of a block.

For one row x of X, and all rows y of Y, each metric is a growing or falling function of a score::

    inner       x . y                              score  x . y
    cosine      x . y / (|x| |y|)                  score  x . y / |y|
    euclidean   sqrt(|x|^2 + |y|^2 - 2 x . y)      score  x . y - |y|^2 / 2

The best k by the score are the nearest, and |x| counts only for what is returned.

Inner products come in the type in which they were accumulated: rounded to float16, those beyond 65504 are infinite.
Where norms are so large or so small that float32 could not hold their products, rows are multiplied after a division
by powers of two, and `unscaled` makes inner products in float64 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from distmm.planning.problem import accumulator_dtype
from distmm.worker import gpu
from distmm.worker.tasks.rows import by_rows

Metric = Literal["inner", "cosine", "euclidean"]

METRICS: tuple[Metric, ...] = ("inner", "cosine", "euclidean")

# Metrics that need the norms of rows.
NORMED = ("cosine", "euclidean")

# Least product of two norms, and largest square of a norm, for which float32 holds inner products and squares with all
# digits that count: a term that is lost is below 2^-126.
LEAST, MOST = 2.0**-96, 2.0**120

Block = Any  # a NumPy or CuPy array


def squared_norms(block: Block) -> np.ndarray:
    """Return the squared Euclidean norm of each row of a block ``(m, n)``, as float64 in host memory, ``(m, 1)``."""
    if gpu.namespace(block) is np:
        x = gpu.numbers(block)
        x = x if x.dtype.kind == "f" else x.astype(np.float64)
        # In one call: after each of many short ones a thread waits for the interpreter's lock. On a host with H200s,
        # 32 MB took a thread 0.18 s while two others worked. In one call, 32 MB take 0.01 s of a core.
        return np.asarray(np.einsum("ij,ij->i", x, x, dtype=np.float64)[:, None])

    def squares(x: Block, at: tuple[Any, ...]) -> tuple[Block]:
        wide = gpu.numbers(x).astype(np.float64)
        return ((wide * wide).sum(axis=1, keepdims=True),)

    return gpu.completed(lambda: np.asarray(by_rows(block, squares)[0].get()), "the norms of a block")


def needs_exponents(dtype: np.dtype[Any]) -> bool:
    """Whether products of this type may overflow where float64 does not: products of float16 are below 2^33 k."""
    return dtype in (np.float32, ml_dtypes.bfloat16)


def exponents(norms: Sequence[np.ndarray], dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the powers of two by which rows are divided before they are multiplied, or None if none needs it.

    Parameters
    ----------
    norms : arrays ``(m,)`` and ``(n,)``
        Squared norms of the rows of X and of Y, in host memory.
    dtype : dtype
        Type of the product.
    """
    if not needs_exponents(dtype):
        return None
    counted = [np.isfinite(squares) & (squares > 0) for squares in norms]
    known = [squares[at] for squares, at in zip(norms, counted, strict=True) if at.any()]
    if not known or (known[0].min() * known[-1].min() >= LEAST**2 and max(map(np.max, known)) <= MOST):
        return None
    rows, columns = (np.frexp(np.sqrt(np.where(at, squares, 0)))[1] for squares, at in zip(norms, counted, strict=True))
    return rows, columns


def scaled(block: Block, powers: np.ndarray, dtype: np.dtype[Any]) -> Block:
    """Return rows ``(m, k)`` divided by powers of two, as an array of type `dtype`, which holds the results."""
    library = gpu.namespace(block)
    wide = block.astype(np.float32, copy=False)
    return library.ldexp(wide, -library.asarray(powers)[:, None]).astype(dtype, copy=False)


def unscaled(products: Block, powers: tuple[np.ndarray, np.ndarray]) -> Block:
    """Return the inner products ``(m, n)`` of rows, in float64, given those of rows that were divided."""
    library = gpu.namespace(products)
    rows, columns = map(library.asarray, powers)
    return library.ldexp(products.astype(np.float64), rows[:, None] + columns)


def weighing(metric: Metric, squares: Any, work: np.dtype[Any]) -> tuple[Literal["plain", "times", "minus"], Any]:
    """Return the operation that makes scores of inner products, and the weights ``(n,)`` that it takes.

    Parameters
    ----------
    metric : {"inner", "cosine", "euclidean"}
    squares : array ``(n,)``
        Squared norms of the rows of Y; None for "inner".
    work : dtype
        Type of the weights.
    """
    if metric == "cosine":
        return "times", (1 / _lengths(squares)).astype(work)
    if metric == "euclidean":
        return "minus", (squares / 2).astype(work)
    return "plain", None


def weighed(products: Block, metric: Metric, squares: Any) -> Block:
    """Return the score of each inner product ``(r, n)``, in a new array.

    Parameters
    ----------
    products : array
    metric, squares
        As in `weighing`.
    """
    work = accumulator_dtype(products.dtype)
    made = products.astype(work)
    with np.errstate(invalid="ignore", over="ignore"):  # of infinite products and norms
        how, weights = weighing(metric, squares, work)
        if how == "times":
            made *= weights
        elif how == "minus":
            made -= weights
    return made


def scores(products: Block, metric: Metric, squares: Any) -> Block:
    """Return what `weighed` returns, with minus infinity for NaN: a NaN is near nothing."""
    made = weighed(products, metric, squares)
    library = gpu.namespace(made)
    return library.where(library.isnan(made), made.dtype.type(-np.inf), made) if made.dtype.kind == "f" else made


def least_scores(t: float, metric: Metric, squares: Any, work: np.dtype[Any], dtype: np.dtype[Any]) -> Any:
    """Return a score ``(r,)`` for each row of X that no pair of rows with a value of at least `t` is below.

    For "euclidean", `t` is the greatest distance. It is a little lower than the score of `t` itself: `value_of` rounds
    a quotient or a square root once, and its result to the type `dtype`. So `t` is taken four units of that type lower
    (higher for distances), and a score that falls between two numbers becomes the lower one.

    Parameters
    ----------
    t : float
    metric : {"cosine", "euclidean"}
    squares : array ``(r,)``
        Squared norms of the rows of X, in float64.
    work, dtype : dtype
        Of the scores, and of the values, which are no wider.
    """
    library, limits = gpu.namespace(squares), np.finfo(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        limit = float(dtype.type(float(t)))  # values are compared with t in their type
        slack = 4 * float(limits.eps) * abs(limit) + float(limits.smallest_subnormal)
        if metric == "cosine":
            least = _lengths(squares) * (limit - slack)
        else:
            square = (limit + slack) * (limit + slack)
            least = (squares - square) / 2 - 4 * np.finfo(np.float64).eps * (squares + square)
        least = library.nextafter(least.astype(work), work.type(-np.inf))
    # NaN comes of infinite norms and thresholds: there the values decide.
    return library.where(library.isnan(least), work.type(-np.inf), least)


def value_of(score: np.ndarray, metric: Metric, squares: np.ndarray | None) -> np.ndarray:
    """Return the similarities or distances of scores ``(r, k)``, given the squared norms ``(r,)`` of the rows of X."""
    if metric == "inner" or squares is None:
        return score
    with np.errstate(invalid="ignore", over="ignore"):
        if metric == "cosine":
            values = score / _lengths(squares)[:, None]
        else:
            values = np.sqrt(np.maximum(squares[:, None] - 2 * score.astype(np.float64), 0))
        return values.astype(score.dtype)


def _lengths(squares: Any) -> Any:
    """Norms to divide by: a row of zeros has the cosine 0 with all others.

    CuPy's ``lengths[lengths == 0] = 1`` would count the zeros, and so wait until the block's product has ended.
    """
    library = gpu.namespace(squares)
    return library.sqrt(library.where(squares == 0, 1, squares))

"""The public functions `topk` and `threshold`, which write a part of C to disk. `resume` continues such jobs."""

from __future__ import annotations

from typing import Any, Literal, Unpack

from distmm.errors import InputError
from distmm.job.job import JobKeywords, Path, begin
from distmm.job.reduction import Reduction, Threshold, TopK
from distmm.job.summary import Summary
from distmm.product.choices import takes
from distmm.product.reduction_limits import check_threshold
from distmm.product.scalars import plain


@takes(JobKeywords)
def topk(
    a: Any,
    b: Any,
    k: int,
    out: Path,
    *,
    metric: Literal["inner", "cosine", "euclidean"] | None = None,
    transa: bool = False,
    transb: bool = False,
    **keywords: Unpack[JobKeywords],
) -> Summary:
    """Write the k best elements of each row of ``op(A) @ op(B)``, and their columns, to disk. C is never stored.

    A *block row* is one row of blocks of C. The worker that computes a block checks and reduces it. When all blocks of
    a block row are right, the block row is written, and gets a marker. After a stop or a kill the same call, or
    `distmm.resume`, computes the block rows that have no marker. The result gets its name when it is complete. Its
    chunks are block rows.

    Parameters
    ----------
    a, b : str, path, or array
        Matrices of shape (m, d) and (d, n) of real numbers, as in `distmm.multiply`, but not Dask arrays. If `b` is
        None, the product is ``A @ A.T``, or ``A.T @ A`` with `transa`. Both elements (i, j) and (j, i) are then
        computed and kept.
    k : int
        Number of elements of each row, from 1 to n.
    out : str or path
        Zarr group with the arrays ``values`` and ``indices``, both of shape (m, k). ``indices`` has columns of C, in
        int64. Values of bfloat16 products, and of float16 with a metric, are written as float32.
    metric : {"inner", "cosine", "euclidean"}, optional
        As in `distmm.nearest`, for the rows of A and the columns of B (with `transb`, the rows of `b`). By default the
        largest elements of C are kept, in NumPy's order, as in `distmm.topk`. Rows of float32 whose norms are so large
        or small that float32 cannot hold their products are refused for "cosine" and "euclidean".
    transa, transb, precision, kernel, reproducible, device, client, blocks, plan, connect, stop, announce, progress
        As in `distmm.multiply`.
    overwrite
        As in `distmm.multiply`.
    check : {"freivalds", "none"}, optional
        "freivalds": compare each block of C with sketches of A and B before it is reduced. At the end, compute 32
        random rows again over all columns, and compare them with the result.
    seed
        As in `distmm.multiply`.

    Returns
    -------
    Summary
        Its `entries` is the number of elements that are kept.

    Raises
    ------
    InputError, DoesNotFitError
        As in `distmm.multiply`. Also for complex numbers, a `k` that is not from 1 to n, and a metric for integers.
    Stopped
        As in `distmm.multiply`.
    WrongResultError
        If a block is wrong on several workers, or a row that is computed again differs from the result.

    Examples
    --------
    >>> from distmm import job
    >>> job.topk("X.npy", "Y.npy", 15, "near.zarr", metric="cosine", transb=True)  # doctest: +SKIP
    >>> group = zarr.open_group("near.zarr", mode="r")  # doctest: +SKIP
    >>> values, indices = group["values"][:], group["indices"][:]  # doctest: +SKIP
    """
    return _reduced(TopK(plain(k), metric), a, b, out, transa, transb, keywords)


@takes(JobKeywords)
def threshold(
    a: Any,
    b: Any,
    t: float,
    out: Path,
    *,
    metric: Literal["inner", "cosine", "euclidean"] | None = None,
    most: int | None = None,
    transa: bool = False,
    transb: bool = False,
    **keywords: Unpack[JobKeywords],
) -> Summary:
    """Write the elements of ``op(A) @ op(B)`` that are at least `t`, and their coordinates, to disk. C is never stored.

    The job runs, stops and is resumed in the same way as that of `topk`.

    Parameters
    ----------
    a, b : str, path, or array
        As in `topk`.
    t : scalar
        The threshold, in the type of the values. NaN is not kept.
    out : str or path
        Zarr group with the arrays ``rows``, ``columns`` (int64) and ``values``, with one entry for each kept element,
        sorted by row, then by column:
        ``scipy.sparse.coo_array((values, (rows, columns)), shape=group.attrs["distmm"]["shape"])``.
    metric : {"inner", "cosine", "euclidean"}, optional
        As in `distmm.threshold`. With "euclidean", distances of at most `t` are kept.
    most : int, optional
        Number of elements that may be kept. By default as many as take 40 % of the free disk: block rows and result are
        on the disk at the same time. A job that ends at this limit can be continued with a higher limit.
    transa, transb, precision, kernel, reproducible, device, client, blocks, plan, connect, stop, announce, progress
        As in `topk`.
    overwrite, check, seed
        As in `topk`.

    Returns
    -------
    Summary
        As of `topk`.

    Raises
    ------
    InputError
        As in `topk`. Also for a `t` that is not a real number, and for a negative distance.
    DoesNotFitError
        If more than `most` elements are kept, or if those of a block row would take more memory than planned (half a
        block of C, or 64 MB). The error says how many elements were kept, and how many were examined. Finished block
        rows are kept.
    Stopped, WrongResultError
        As in `topk`.

    Examples
    --------
    >>> from distmm import job
    >>> job.threshold("X.zarr", "X.zarr", 0.9, "network.zarr", transb=True)  # doctest: +SKIP
    """
    check_threshold(t, most, metric)
    limit = None if most is None else int(most)
    return _reduced(Threshold(plain(t), metric), a, b, out, transa, transb, keywords, limit)


def _reduced(
    reduction: Reduction, a: Any, b: Any, out: Path, transa: bool, transb: bool, keywords: JobKeywords,
    most: int | None = None,
) -> Summary:  # fmt: skip
    """Begin or continue a job whose product is reduced."""
    if b is None:
        if transb:
            raise InputError("transb is True, but B is None: leave transb out, or give B")
        b, transb = a, not transa
    return begin(a, b, None, out, keywords, most=most, transa=transa, transb=transb, reduction=reduction)

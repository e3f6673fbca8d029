"""The public function `tensordot`: sums of products over dimensions of two arrays, with NumPy's semantics."""

from __future__ import annotations

import operator
from typing import Any, Unpack

from numpy.lib.array_utils import normalize_axis_tuple

from distmm.errors import InputError
from distmm.product.choices import Choices, Keywords, takes
from distmm.product.labelled import Label, Labelled
from distmm.product.network import contracted
from distmm.product.out_target import is_written


@takes(Keywords)
def tensordot(A: Any, B: Any, axes: Any = 2, *, out: Any = None, **choices: Unpack[Keywords]) -> Any:
    """Sum products over dimensions of two arrays, as `numpy.tensordot` does, by one matrix product.

    The dimensions that are summed over become k. The other dimensions of A become the rows of C, and those of B its
    columns. Arrays in memory are rearranged only if their strides do not allow a view: NumPy arrays by the workers of a
    cluster when they read them, CuPy arrays, and all arrays without a cluster, at the call. Dask
    arrays are reshaped block by block. If their chunks differ along the dimensions that are summed over, one of them is
    rechunked first.

    Parameters
    ----------
    A, B : array-like of any number of dimensions
        As in `matmul`.
    axes : int, or pair of int or of sequences of int
        An integer N: sum over the last N dimensions of `A` and the first N of `B`, in this order. A pair: the
        dimensions of `A`, and the dimensions of `B` in the same order.
    out : numpy.ndarray, Zarr-like or Dask array, optional
        As in `matmul`. Finished blocks are written at once into an array with the shape of the matrix C, and into a
        NumPy array that can be viewed as C. For any other `out` the whole result is computed in the workers' memory
        first.
    precision, kernel, reproducible, device, client
        As in `matmul`.

    Returns
    -------
    dask.array.Array
        Lazy. Its dimensions are those of A that are not summed over, then those of B. With `out`: that array.

    Raises
    ------
    InputError
        As in `matmul`. Also for axes that do not exist, occur twice, or differ in length.
    DoesNotFitError
        As in `matmul`.

    See Also
    --------
    einsum : Batch dimensions, diagonals, and more than two arrays.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B = np.ones((3, 4, 5)), np.ones((4, 5, 6))
    >>> distmm.tensordot(A, B).compute()[0]
    array([20., 20., 20., 20., 20., 20.])
    """
    a, b, output = labelled(A, B, axes)
    return contracted([a, b], output, Choices.of(now=is_written(out), **choices), out)


def labelled(A: Any, B: Any, axes: Any) -> tuple[Labelled, Labelled, tuple[Label, ...]]:
    """Return both operands with labels for `axes` as in `tensordot`, and the labels of the result."""
    a, b = Labelled.of(A, "A"), Labelled.of(B, "B")
    axes_a, axes_b = _axes(axes, a, b)
    ndim_a, ndim_b = len(a.labels), len(b.labels)
    b = b.labelled([axes_a[axes_b.index(axis)] if axis in axes_b else ndim_a + axis for axis in range(ndim_b)])
    return a, b, (*(x for x in a.labels if x not in axes_a), *(x for x in b.labels if x not in axes_a))


def _axes(axes: Any, a: Labelled, b: Labelled) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dimensions of A and B that are summed over, as numbers from 0."""
    given = f"axes is {axes!r}, A has shape {a.source.shape} and B {b.source.shape}"
    try:
        number = isinstance(axes, int) or getattr(axes, "ndim", 1) == 0  # NumPy's numbers and 0-d arrays, too
        count = operator.index(axes) if number else -1
        first, second = (range(-count, 0), range(count)) if count >= 0 else axes
        axes_a = normalize_axis_tuple(first, len(a.labels), "axes of A")
        axes_b = normalize_axis_tuple(second, len(b.labels), "axes of B")
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{given} ({error}): give a number of dimensions that both have, or a pair of (lists of) dimensions"
        ) from None
    if [a.sizes[axis] for axis in axes_a] != [b.sizes[axis] for axis in axes_b]:
        raise InputError(f"{given}: dimensions {axes_a} of A must be as many, and as long, as dimensions {axes_b} of B")
    return axes_a, axes_b

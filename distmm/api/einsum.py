"""`einsum` and `multi_dot`: products of any number of arrays, with NumPy's semantics."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from distributed import Client

from distmm.api.labelled import Labelled
from distmm.api.network import contracted
from distmm.api.subscripts import as_written, read
from distmm.api.wishes import Wishes
from distmm.clusters import cluster
from distmm.errors import InputError
from distmm.planning.precision import Precision

__all__ = ["einsum", "multi_dot"]


def einsum(
    *operands: Any,
    precision: Precision | None = None,
    kernel: str | None = None,
    device: cluster.Device | None = None,
    out: Any = None,
    client: Client | None = None,
) -> Any:
    """Sum products of any number of arrays over indices, as `numpy.einsum` does, by matrix products.

    Two arrays take one matrix product, or a batched one: indices that both have and the result has not are summed over,
    indices that all three have are batch dimensions. Indices that one array has alone, and the result has not, are
    summed before, and an index that stands twice in an array takes its diagonal. More arrays are multiplied in pairs,
    in an order that opt_einsum chooses, with intermediate results that fit into the memory of the workers. Where
    nothing is summed over, Dask multiplies.

    Parameters
    ----------
    *operands
        Subscripts, such as ``"ij,jk->ik"``, and the arrays; or the arrays, a list of whole numbers after each, and
        perhaps one for the result: ``A, [0, 1], B, [1, 2], [0, 2]``. An ellipsis stands for dimensions that broadcast.
        Without ``->`` the result has the indices that stand once, in alphabetical order. Arrays are as in `matmul`;
        those in memory are summed, and copied where their strides forbid a view, at the call.
    precision, kernel, device
        As in `matmul`.
    out : numpy.ndarray, Zarr-like or Dask array, optional
        As in `tensordot`.
    client : distributed.Client, optional
        As in `matmul`.

    Returns
    -------
    dask.array.Array
        Lazy, of the type that all arrays have in common. With `out`: that array.

    Raises
    ------
    InputError
        For subscripts that NumPy refuses, naming index, operand and shape; before any work.
    DoesNotFitError
        As in `matmul`, and where no order is found whose intermediate results fit.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B, v = np.ones((3, 4)), np.ones((4, 5)), np.arange(5)
    >>> distmm.einsum("ij,jk,k->i", A, B, v).compute()
    array([40., 40., 40.])
    """
    terms, output, sources = as_written(operands)
    arrays = [Labelled.of(source, f"operand {number}") for number, source in enumerate(sources)]
    subscripts = read(terms, output, [tuple(map(int, array.source.shape)) for array in arrays])
    labelled = [
        array.labelled(labels).diagonal().without_broadcast(subscripts.sizes)
        for array, labels in zip(arrays, subscripts.operands, strict=True)
    ]
    wishes = Wishes.chosen(precision, kernel, device, None, None)
    return contracted(labelled, subscripts.output, wishes, out, cluster.usable(client))


def multi_dot(
    arrays: Sequence[Any],
    *,
    precision: Precision | None = None,
    kernel: str | None = None,
    device: cluster.Device | None = None,
    out: Any = None,
    client: Client | None = None,
) -> Any:
    """Multiply two or more matrices in the order that takes the fewest operations, as `numpy.linalg.multi_dot` does.

    Parameters
    ----------
    arrays : sequence of array-like
        Matrices; the first may be a vector, a row, and the last one too, a column.
    precision, kernel, device
        As in `matmul`.
    out : numpy.ndarray, Zarr-like or Dask array, optional
        As in `matmul`.
    client : distributed.Client, optional
        As in `matmul`.

    Returns
    -------
    dask.array.Array of shape (m, n), (m,), (n,) or ()
        Lazy; with `out`: that array.

    Raises
    ------
    InputError
        For fewer than two arrays, for others than matrices inside, and for sizes that do not fit together.
    DoesNotFitError
        As in `einsum`.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B, C = np.ones((100, 3)), np.ones((3, 100)), np.ones((100, 4))
    >>> distmm.multi_dot([A, B, C]).compute()[0]
    array([300., 300., 300., 300.])
    """
    chain = [Labelled.of(source, f"array {number}") for number, source in enumerate(arrays)]
    last = len(chain) - 1
    if last < 1:
        raise InputError(f"multi_dot has {len(chain)} array{'s' * (last < 0)}: give two or more")
    labelled = []
    for number, array in enumerate(chain):
        shape = array.source.shape
        if len(shape) != 2 and not (len(shape) == 1 and number in (0, last)):
            raise InputError(f"array {number} has shape {shape}: only the first and the last array may be vectors")
        labelled.append(array.labelled((number, number + 1) if len(shape) == 2 else (1,) if number == 0 else (last,)))
    for number, (left, right) in enumerate(itertools.pairwise(labelled)):
        if left.sizes[number + 1] != right.sizes[number + 1]:
            raise InputError(
                f"array {number} has shape {left.source.shape} and array {number + 1} {right.source.shape}: the last "
                "dimension of one must be as long as the first of the next"
            )
    output = tuple(end for end in (0, last + 1) if any(end in array.labels for array in labelled))
    wishes = Wishes.chosen(precision, kernel, device, None, None)
    return contracted(labelled, output, wishes, out, cluster.usable(client), "dp")

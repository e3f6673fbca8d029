"""The public functions `cov` and `corrcoef`, with NumPy's semantics. They centre the observations and call `gram`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any, Unpack

import dask.array as da
import ml_dtypes
import numpy as np
from dask.array.utils import meta_from_array
from dask.blockwise import Blockwise
from dask.delayed import Delayed
from dask.graph_manipulation import clone

from distmm.api.array import gram
from distmm.errors import InputError
from distmm.product.arrays_in_graphs import rechunked
from distmm.product.choices import Choices, Keywords, takes
from distmm.product.labelled import Labelled
from distmm.product.operand_pair import check_kinds
from distmm.product.scalars import check_flags, common_type


@takes(Keywords)
def cov(
    m: Any,
    y: Any = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
    *,
    dtype: Any = None,
    **choices: Unpack[Keywords],
) -> da.Array:
    """Estimate a covariance matrix, as `numpy.cov` does, from observations that need not fit into memory.

    The observations are read twice: first for their means, then for the product of the centred blocks. `gram` computes
    one triangle of the product. A NumPy or CuPy array is copied and centred at the call. A Dask array is computed twice
    if each of its blocks is made from one block of an array or file. The blocks of other Dask arrays, such as persisted
    arrays and products, stay in the workers' memory between the two passes.

    Parameters
    ----------
    m : array-like of shape (variables, observations) or (observations,)
        As in `matmul`.
    y : array-like, optional
        More variables, for the same observations.
    rowvar : bool
        True: each row is a variable. False: each column is one.
    bias : bool
        Divide by the number of observations n instead of n - 1.
    ddof : int, optional
        Divide by n - ddof. It overrides `bias`.
    fweights : array-like of int of shape (observations,), optional
        How many times each observation counts.
    aweights : array-like of shape (observations,), optional
        The weight of each observation.
    dtype : data type, optional
        Floating-point or complex type of the centred observations and of the result. By default float64, or complex128
        for complex observations. Means are always computed in float64 or complex128, or in a wider `dtype`.
    precision, kernel, reproducible, device, client
        As in `matmul`.

    Returns
    -------
    dask.array.Array of shape (variables, variables), or () for one variable
        Lazy.

    Raises
    ------
    InputError
        For arrays of more than two dimensions, for different numbers of observations or weights, and for weights or a
        `ddof` that NumPy refuses.
    DoesNotFitError
        As in `matmul`.

    Warns
    -----
    RuntimeWarning
        If there are no degrees of freedom.

    See Also
    --------
    corrcoef : The covariance of variables that are scaled to a variance of 1.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> distmm.cov(np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])).compute()
    array([[ 1., -1.],
           [-1.,  1.]])
    """
    check_flags(rowvar=rowvar, bias=bias)
    Choices.of(**choices)  # refuses what cannot be used, before any work
    if ddof is not None and (not isinstance(ddof, Real) or ddof % 1 != 0):
        raise InputError(f"ddof is {ddof!r}: give a whole number")
    first, second, dtype = _observations(m, y, rowvar, dtype)
    n = first.shape[1]
    weights, freedom = _weights(fweights, aweights, n, int(not bias) if ddof is None else int(ddof))
    if freedom <= 0:
        warnings.warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=3)
    wide = np.result_type(dtype, np.float64)
    if weights is None:
        centred = second - first.mean(axis=1, dtype=wide, keepdims=True)
    else:
        weights = np.asarray(weights, like=meta_from_array(first))
        mean = (first * weights).sum(axis=1, dtype=wide, keepdims=True) / weights.sum()
        centred = (second - mean) * np.sqrt(weights)
    alpha = np.inf if freedom <= 0 else 1 / freedom
    return gram(centred.astype(dtype), alpha=alpha, **choices).squeeze()


@takes(Keywords)
def corrcoef(x: Any, y: Any = None, rowvar: bool = True, *, dtype: Any = None, **choices: Unpack[Keywords]) -> da.Array:
    """Compute Pearson's correlation coefficients, as `numpy.corrcoef` does.

    The observations are centred and scaled before they are multiplied. A finished block of the product is then a
    finished block of the result. The observations are read as in `cov`.

    Parameters
    ----------
    x : array-like of shape (variables, observations) or (observations,)
        As in `matmul`.
    y, rowvar, dtype
        As in `cov`.
    precision, kernel, reproducible, device, client
        As in `matmul`.

    Returns
    -------
    dask.array.Array of shape (variables, variables), or () for one variable
        Lazy. Real and imaginary parts are between -1 and 1. As in NumPy, variables that do not vary have NaN, and so
        have two whose variances overflow, and all without observations.

    Raises
    ------
    InputError
        As in `cov`.
    DoesNotFitError
        As in `matmul`.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> distmm.corrcoef(np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])).compute().round(12)
    array([[ 1., -1.],
           [-1.,  1.]])
    """
    check_flags(rowvar=rowvar)
    Choices.of(**choices)  # refuses what cannot be used, before any work
    first, second, dtype = _observations(x, y, rowvar, dtype)
    n = first.shape[1]
    if isinstance(first, da.Array) and n:  # Dask's variance is NaN where a chunk is empty
        first = rechunked(first, (first.chunks[0], tuple(filter(None, first.chunks[1]))))
    wide = np.result_type(dtype, np.float64)
    mean = first.mean(axis=1, dtype=wide, keepdims=True)
    real = np.dtype(f"f{wide.itemsize // 2}") if wide.kind == "c" else wide
    parts = (first.real, first.imag) if first.dtype.kind == "c" else (first,)
    # CuPy's `var` rounds the mean to the type of the array, whatever `dtype` it is given.
    variance = sum(part.astype(real, copy=False).var(axis=1, keepdims=True) for part in parts)
    scaled = ((second - mean) / np.sqrt(variance * n)).astype(dtype)
    c = gram(scaled, alpha=1 if n else np.nan, **choices)
    lines = da.asanyarray(variance).rechunk((c.chunks[0], 1))
    return c.map_blocks(_clipped, lines, lines.T, dtype=dtype, meta=c._meta).squeeze()


def _clipped(block: Any, of_rows: Any, of_columns: Any) -> Any:
    """Clip real and imaginary parts to -1 and 1, which rounding may exceed. NaN where two variances have overflowed."""
    clipped = block.real.clip(-1, 1)
    if block.dtype.kind == "c":
        clipped = (clipped + 1j * block.imag.clip(-1, 1)).astype(block.dtype)
    clipped[(of_rows == np.inf) & (of_columns == np.inf)] = np.nan
    return clipped


def _observations(m: Any, y: Any, rowvar: bool, dtype: Any) -> tuple[Any, Any, np.dtype]:
    """Return the variables as rows, for the first pass and for the second, and the type of the result."""
    arrays = [Labelled.of(m, "m")] + ([] if y is None else [Labelled.of(y, "y")])
    for array in arrays:
        if len(array.labels) > 2:
            raise InputError(f"{array.name} has shape {array.source.shape}: give one or two dimensions")
    check_kinds(arrays)
    given = common_type({array.name: array.dtype for array in arrays})
    dtype = np.result_type(given, np.float64) if dtype is None else np.dtype(dtype)
    if dtype.kind not in "fc" and dtype != ml_dtypes.bfloat16:
        raise InputError(f"dtype is {dtype}: give a floating-point or complex type")
    if given.kind == "c" and dtype.kind != "c":
        raise InputError(f"dtype is {dtype}, and the observations are {given}: give a complex type")
    if all(array.in_memory for array in arrays):
        in_memory = _stacked([array.source for array in arrays], rowvar, np.concatenate)
        return in_memory, in_memory, dtype
    first = _stacked([array.lazy().source for array in arrays], rowvar, da.concatenate)
    second = _stacked([_second_pass(array) for array in arrays], rowvar, da.concatenate)
    return first, second, dtype


def _stacked(sources: list[Any], rowvar: bool, concatenate: Callable[..., Any]) -> Any:
    """Return all variables as rows."""
    rows = []
    for number, source in enumerate(sources):
        variables = source.reshape((1,) * (2 - source.ndim) + source.shape)
        # As in NumPy: a vector is one variable, and so is a y of one row.
        turned = not rowvar and (source.ndim != 1 if number == 0 else variables.shape[0] != 1)
        rows.append(variables.T if turned else variables)
    if len(rows) == 2 and rows[0].shape[1] != rows[1].shape[1]:
        raise InputError(
            f"m has {rows[0].shape[1]} observations, and y has {rows[1].shape[1]}: give as many in both; with "
            "rowvar=False observations are rows"
        )
    return rows[0] if len(rows) == 1 else concatenate(rows, axis=0)


def _weights(fweights: Any, aweights: Any, n: int, ddof: int) -> tuple[np.ndarray | None, float]:
    """Return the weight of each observation, None for 1, and the degrees of freedom."""
    frequencies, importance = _checked(fweights, "fweights", n), _checked(aweights, "aweights", n)
    if frequencies is not None and (frequencies != np.around(frequencies)).any():
        raise InputError("fweights has values that are not whole numbers: give whole numbers, or use aweights")
    if frequencies is None and importance is None:
        return None, n - ddof
    weights = np.prod([given for given in (frequencies, importance) if given is not None], axis=0)
    total = float(weights.sum())
    if total == 0:
        raise InputError("the sum of the weights is 0: give at least one observation a positive weight")
    correction = ddof if importance is None else ddof * float((weights * importance).sum()) / total
    return weights, total - correction


def _checked(given: Any, name: str, n: int) -> np.ndarray | None:
    """Return weights as an array of shape (n,), without negative numbers and NaN."""
    if given is None:
        return None
    weights = np.asarray(given, dtype=float)
    if weights.shape != (n,):
        raise InputError(f"{name} has shape {weights.shape}, and there are {n} observations: give one weight for each")
    if not (weights >= 0).all():
        raise InputError(f"{name} has negative weights, or NaN: give weights of 0 and more")
    return weights


def _second_pass(array: Labelled) -> da.Array:
    """Return a Dask array for the second pass, whose tasks compute the blocks again where that is possible.

    If both passes used the same tasks, all blocks would stay in memory from the first pass to the second. Blocks that
    are read from one array-like or file, and blocks that are computed from one such block, are computed again. Dask
    describes these by `Blockwise` layers. Both passes share the blocks of other arrays: persisted arrays, products,
    rechunked arrays, and arrays made from several arrays.
    """
    source = array.lazy().source
    return _made_again(source) if isinstance(array.source, da.Array) else source


def _made_again(array: da.Array) -> da.Array:
    """Copy the `Blockwise` layers of an array under new names; return the array itself if it has other layers."""
    graph = array.dask
    # Each of these has one task: the array-like that is read, or a single value.
    shared = [name for name, layer in graph.layers.items() if not isinstance(layer, Blockwise)]
    if array.name in shared or any(len(graph.layers[name]) > 1 for name in shared):
        return array
    return clone(array, omit=[Delayed(name, graph, layer=name) for name in shared])

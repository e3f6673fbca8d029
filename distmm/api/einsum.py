"""`einsum` and `multi_dot`: products of any number of arrays, with NumPy's semantics."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Unpack

from distmm.errors import InputError
from distmm.product.choices import Choices, Keywords, takes
from distmm.product.labelled import Label, Labelled
from distmm.product.network import contracted
from distmm.product.out_target import is_written


@takes(Keywords)
def einsum(*operands: Any, out: Any = None, **choices: Unpack[Keywords]) -> Any:
    """Sum products of any number of arrays over indices, as `numpy.einsum` does, by matrix products.

    Two arrays take one GEMM or one batched GEMM. An index that both arrays have and the result lacks is summed over. An
    index that both arrays and the result have is a batch dimension. An index that only one array has, and the result
    lacks, is summed before the product. An index that occurs twice in an array takes the diagonal. More than two arrays
    are multiplied in pairs. opt_einsum chooses an order whose intermediate results fit into the memory of the workers.
    If no index is summed over, Dask multiplies element by element.

    Parameters
    ----------
    *operands
        Subscripts, such as ``"ij,jk->ik"``, and the arrays. Or each array followed by a list of whole numbers, with an
        optional list for the result at the end: ``A, [0, 1], B, [1, 2], [0, 2]``. An ellipsis denotes dimensions that
        broadcast. Without ``->`` the result has the indices that occur once, in alphabetical order. Arrays are as in
        `matmul`. Arrays in memory are summed at the call. If their strides do not allow a view as matrices, workers of
        a cluster rearrange NumPy arrays when they read them; others are copied at the call.
    out : numpy.ndarray, Zarr-like or Dask array, optional
        As in `tensordot`.
    precision, kernel, reproducible, device, client
        As in `matmul`.

    Returns
    -------
    dask.array.Array
        Lazy, of NumPy's result type for all arrays. With `out`: that array.

    Raises
    ------
    InputError
        For subscripts that cannot be read or do not match the shapes, before any work. Labels may be any characters but
        ``,.->`` and blanks, and in lists any objects that can be sorted; `numpy.einsum` refuses all but 52 letters.
    DoesNotFitError
        As in `matmul`, and if no order is found whose intermediate results fit.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B, v = np.ones((3, 4)), np.ones((4, 5)), np.arange(5)
    >>> distmm.einsum("ij,jk,k->i", A, B, v).compute()
    array([40., 40., 40.])
    """
    arrays, output = _labelled(operands)
    return contracted(arrays, output, Choices.of(now=is_written(out), **choices), out)


@takes(Keywords)
def multi_dot(arrays: Sequence[Any], *, out: Any = None, **choices: Unpack[Keywords]) -> Any:
    """Multiply two or more matrices in the order that takes the fewest operations, as `numpy.linalg.multi_dot` does.

    Parameters
    ----------
    arrays : sequence of array-like
        Matrices. The first may be a vector, which counts as a row. The last may be a vector, which counts as a column.
    out : numpy.ndarray, Zarr-like or Dask array, optional
        As in `matmul`.
    precision, kernel, reproducible, device, client
        As in `matmul`.

    Returns
    -------
    dask.array.Array of shape (m, n), (m,), (n,) or ()
        Lazy. With `out`: that array.

    Raises
    ------
    InputError
        For fewer than two arrays, for inner arrays that are not matrices, and for sizes that do not match.
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
        raise InputError(f"multi_dot got {len(chain)} array{'s' * (last < 0)}: give two or more")
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
    return contracted(labelled, output, Choices.of(now=is_written(out), **choices), out, "dp")


def _labelled(arguments: tuple[Any, ...]) -> tuple[list[Labelled], tuple[str, ...]]:
    """Parse the arguments of `einsum`. Return its operands, without repeated labels, and the labels of the result."""
    from opt_einsum import parser  # late: the import takes 0.2 s

    if not arguments:
        raise InputError("einsum has no arguments: give subscripts such as 'ij,jk->ik', and the operands")
    text, sources = arguments[0], arguments[1:]
    if not isinstance(text, str):
        lists = (*arguments[1::2], *arguments[len(arguments) // 2 * 2 :])
        if not all(isinstance(each, (list, tuple)) for each in lists):
            raise InputError("give subscripts such as 'ij,jk->ik' first, or a list of indices after each operand")
        try:
            text, sources = parser.convert_interleaved_input(arguments)
        except (KeyError, TypeError) as error:
            raise InputError(f"einsum cannot use the indices {lists}: {error!r}; is one only in the output?") from None
        letters = "".join(map(parser.get_symbol, range(52)))  # from a to Z; an output that is left out begins with A
        text = text.translate(str.maketrans(letters, letters.swapcase()))
    arrays = [Labelled.of(source, f"operand {number}") for number, source in enumerate(sources)]
    shapes = [tuple(map(int, array.source.shape)) for array in arrays]
    count = text.count(",") + 1  # also where the output has a comma
    if count != len(arrays):
        raise InputError(f"subscripts {text!r} are for {count} operands, and einsum got {len(arrays)}: give as many")
    try:
        names, output, _ = parser.parse_einsum_input((text, *shapes), shapes=True)
    except ValueError as error:
        raise InputError(f"the subscripts {text!r}, for shapes {shapes}: {error}") from None
    if ">" in text and set(names) - {*text, *output}:
        raise InputError(f"an ellipsis in {text!r} stands for dimensions that the output lacks: add ... to the output")
    terms = names.split(",")
    sizes: dict[Label, int] = {}
    for number, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        if len(term) != len(shape):
            raise InputError(
                f"operand {number} of {text!r} has shape {shape}, {len(shape)} dimensions, and its subscripts name "
                f"{len(term)}: give one index for each dimension, or an ellipsis"
            )
        for axis, (label, n) in enumerate(zip(term, shape, strict=True)):
            known = sizes.get(label, 1)
            if shape[term.index(label)] != n or (n != known and 1 not in (n, known)):
                raise InputError(
                    f"index {label!r} of {names!r} has length {n} in dimension {axis} of operand {number}, and another "
                    f"one before, for shapes {shapes}: lengths must be equal, or 1 in another operand"
                )
            sizes[label] = n if known == 1 else known
    labelled = [array.labelled(term).diagonal() for array, term in zip(arrays, terms, strict=True)]
    return [array.without_broadcast(sizes) for array in labelled], tuple(output)

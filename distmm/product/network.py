"""The contraction of any number of labelled arrays (a tensor network) in pairs, in the cheapest order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from distmm import units
from distmm.errors import DoesNotFitError
from distmm.planning.problem import accumulator_dtype
from distmm.product.choices import Choices
from distmm.product.contraction import contract
from distmm.product.dlpack import package_among
from distmm.product.labelled import Label, Labelled
from distmm.product.operand_pair import check_kinds
from distmm.product.out_target import check_out, elements_of
from distmm.product.product_array import of_package
from distmm.product.scalars import common_type
from distmm.product.sinks import fill

Labels = tuple[Label, ...]


def contracted(
    arrays: list[Labelled], output: Labels, choices: Choices, out: Any, optimizer: Literal["auto", "dp"] = "auto"
) -> Any:
    """Multiply arrays, and sum over the labels that `output` lacks.

    Parameters
    ----------
    arrays : list of Labelled
        No label occurs twice in an array. The lengths of common labels agree. The names differ.
    output : tuple
        Labels of the result.
    choices : Choices
    out : array, optional
        Receives the result.
    optimizer : {"auto", "dp"}
        An optimizer of opt_einsum. "auto" searches more exhaustively the fewer arrays there are. "dp" finds the best
        order of a chain.

    Returns
    -------
    dask.array.Array
        Lazy. With `out`: that array.

    Raises
    ------
    InputError
        For NumPy blocks mixed with CuPy blocks, for types without a common type in NumPy, and for an `out` that cannot
        receive the result.
    DoesNotFitError
        If no order is found whose intermediate results fit.
    """
    if (elements := elements_of(out)) is not out:
        contracted(arrays, output, choices, elements, optimizer)
        return out
    check_kinds(arrays)
    package = package_among(arrays)
    dtype = common_type({array.name: array.dtype for array in arrays})
    if out is not None:
        sizes = {label: n for array in arrays for label, n in array.sizes.items()}
        shape = tuple(sizes[label] for label in output)
        check_out(out, shape, dtype, arrays[0].kind, {array.name: array.source for array in arrays})
    if len(arrays) == 1:
        return _filled(arrays[0].lazy().summed(output, dtype).arranged(output), out, choices, package)
    if len(arrays) > 2:
        counts = Counter(label for array in arrays for label in array.labels)
        alone = {label for label, count in counts.items() if count == 1} - set(output)
        arrays = [array.cast(dtype).summed(counts.keys() - alone, dtype) for array in arrays]
    *steps, last = _order(arrays, output, optimizer, choices)
    for step in steps:
        x, y = _taken(arrays, step)
        needed = {*output, *(label for array in arrays for label in array.labels)}
        kept = tuple(label for label in dict.fromkeys((*x.labels, *y.labels)) if label in needed)
        arrays.append(contract(x, y, kept, choices))
    x, y = _taken(arrays, last)
    return _filled(contract(x, y, output, choices, out), out, choices, package)


def _filled(result: Labelled, out: Any, choices: Choices, package: str) -> Any:
    """Return the lazy result, which computes to an array of `package`, or `out` with its elements."""
    if out is None:
        return of_package(result.source, package)
    return out if result.source is out else fill(out, result.source, choices.client)


def _taken(arrays: list[Labelled], positions: tuple[int, ...]) -> list[Labelled]:
    """Remove some arrays from the list, and return them."""
    return [arrays.pop(position) for position in sorted(positions, reverse=True)][::-1]


def _order(arrays: Sequence[Labelled], output: Labels, optimizer: str, choices: Choices) -> list[tuple[int, ...]]:
    """Return the positions of the two arrays that each step multiplies. The product is appended to the arrays.

    Raises
    ------
    DoesNotFitError
        If some intermediate result would exceed the memory of all workers.
    """
    if len(arrays) == 2:
        return [(0, 1)]
    import opt_einsum  # late: the import takes 0.2 s

    dtype = arrays[0].dtype
    spec = choices.described(choices.client, dtype, arrays[0].kind == "cupy")
    memory = spec.workers * spec.memory
    sizes = {label: n for array in arrays for label, n in array.sizes.items()}
    symbols = {label: opt_einsum.get_symbol(number) for number, label in enumerate(sizes)}
    terms = ["".join(symbols[label] for label in labels) for labels in (*(a.labels for a in arrays), output)]
    limit = max(memory // accumulator_dtype(dtype).itemsize, math.prod(sizes[label] for label in output))
    search = partial(
        opt_einsum.contract_path,
        f"{','.join(terms[:-1])}->{terms[-1]}",
        *(array.source.shape for array in arrays),
        shapes=True,
        optimize=optimizer,
    )
    path, found = search()
    if found.largest_intermediate > limit:  # only now: a search with a limit takes longer, and misses good orders
        try:
            path, _ = search(memory_limit=limit)
        except RuntimeError:  # "dp" found no order
            path = [tuple(range(len(arrays)))]
    if any(len(step) != 2 for step in path):
        raise DoesNotFitError(
            f"no order of the {len(arrays)} arrays was found in which each intermediate result fits into "
            f"{units.size(memory)}, the memory of {spec.workers} workers: use more workers, or contract some of the "
            "arrays first, with out="
        )
    return list(path)

"""Dask arrays with a task for each block: a call, or a reshaped block of another array; arrays that are transposes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from dask.base import tokenize
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph

from distmm.graph.dask_tasks import Task, TaskRef
from distmm.worker.tasks.arrivals import rearranged

if TYPE_CHECKING:
    import dask.array as da


def transposed(array: da.Array) -> da.Array | None:
    """Return the matrices that Dask transposes to make `array`; None if `array` is made in another way."""
    import dask.array as da

    layer = array.dask.layers.get(array.name)
    if array.ndim < 2 or not isinstance(layer, Blockwise) or layer.task.func not in (np.transpose, np.swapaxes):
        return None
    ((name, index),), (*batch, row, column) = layer.indices, layer.output_indices
    if index != (*batch, column, row):
        return None
    graph = array.dask
    layers, reads = ({key: of[key] for key in of if key != array.name} for of in (graph.layers, graph.dependencies))
    *outer, rows, columns = array.chunks
    return da.Array(HighLevelGraph(layers, reads), name, (*outer, columns, rows), meta=array)


def one_per_block(name: str, function: Callable[..., Any], arguments: dict[tuple[int, ...], Any]) -> HighLevelGraph:
    """Return the graph of an array that has one task for each block: `function` of that block's argument."""
    made = {(name, *index): Task((name, *index), function, argument) for index, argument in arguments.items()}
    return HighLevelGraph.from_collections(name, made)


def reshaped(
    array: da.Array,
    chunks: tuple[tuple[int, ...], ...],
    axes: tuple[int, ...] | None = None,
    unchecked: str | Literal[False] = False,
) -> da.Array:
    """Return an array of these chunks whose blocks, in C order, are the reshaped blocks of `array`, in C order.

    No block moves, and none depends on two blocks. If dimensions are merged of which others than the first are cut, the
    order of elements is not that of `numpy.reshape`. Reshaping to the first chunks gives the first array again. A block
    without dimensions is a scalar, as in results of NumPy's functions.

    With `axes`, the array is first transposed. With the name of an `unchecked` array, its blocks are checked.
    """
    import dask.array as da

    axes = tuple(range(array.ndim)) if axes is None else axes
    name = f"distmm-reshape-{tokenize(array.name, array.chunks, chunks, axes, unchecked)}"
    sources = itertools.product(*(range(array.numblocks[axis]) for axis in axes))
    indices = itertools.product(*(range(len(edges)) for edges in chunks))
    made = {}
    for source, index, shape in zip(sources, indices, itertools.product(*chunks), strict=True):
        at = tuple(source[axes.index(axis)] for axis in range(array.ndim))
        given = tuple(edges[i] for edges, i in zip(array.chunks, at, strict=True))
        check = (f"a block of {unchecked}", given, array.dtype) if unchecked else None
        made[name, *index] = Task((name, *index), rearranged, TaskRef((array.name, *at)), axes, shape, check)
    graph = HighLevelGraph.from_collections(name, made, dependencies=[array])
    return da.Array(graph, name, chunks, meta=array)

"""Arrays that are read in two passes, for a statistic and for a product, without storing their blocks in between."""

from __future__ import annotations

import uuid

import dask.array as da
from dask.base import clone_key
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, Layer

from distmm.product.labelled import Labelled

__all__ = ["second_pass"]


def second_pass(array: Labelled) -> da.Array:
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
    again = {name for name, layer in graph.layers.items() if isinstance(layer, Blockwise)}
    shared = {name: layer for name, layer in graph.layers.items() if name not in again}
    if array.name not in again or any(len(layer) > 1 for layer in shared.values()):
        return array
    seed = uuid.uuid4().hex
    names = {name: clone_key(name, seed) for name in again}
    keys = {key for name in again for key in graph.layers[name].get_output_keys()}
    layers: dict[str, Layer] = dict(shared)  # each has one task: the array-like that is read, or a single value
    dependencies = {name: graph.dependencies[name] for name in shared}
    for name, new in names.items():
        layers[new], _ = graph.layers[name].clone(keys, seed)
        dependencies[new] = {names.get(other, other) for other in graph.dependencies[name]}
    return da.Array(HighLevelGraph(layers, dependencies), names[array.name], array.chunks, meta=array)

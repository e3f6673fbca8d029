"""Arrays that are read in two passes, first for a statistic and then for a product: blocks need not stay in between."""

from __future__ import annotations

import uuid

import dask.array as da
from dask.base import clone_key
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, Layer

from distmm.api.labelled import Labelled

__all__ = ["second_pass"]


def second_pass(array: Labelled) -> da.Array:
    """Return an array as a Dask array whose blocks are made by tasks of their own, where they are made one by one.

    If two passes read the same blocks, all of them stay in memory from the first pass to the second. Blocks that are
    read from one array-like or file, and what is computed from such a block alone, are made again instead: Dask
    describes them by `Blockwise` layers. Other arrays are shared: those that are in memory (persisted), products, and
    what was rechunked or put together from several arrays.
    """
    source = array.source
    return _made_again(source) if isinstance(source, da.Array) else array.lazy().source


def _made_again(array: da.Array) -> da.Array:
    graph = array.dask
    again = {name for name, layer in graph.layers.items() if isinstance(layer, Blockwise)}
    shared = {name: layer for name, layer in graph.layers.items() if name not in again}
    if array.name not in again or any(len(layer) > 1 for layer in shared.values()):
        return array
    seed = uuid.uuid4().hex
    names = {name: clone_key(name, seed) for name in again}
    keys = {key for name in again for key in graph.layers[name].get_output_keys()}
    layers: dict[str, Layer] = dict(shared)  # with one task each: the array-like that is read, or a single value
    dependencies = {name: graph.dependencies[name] for name in shared}
    for name, new in names.items():
        layers[new], _ = graph.layers[name].clone(keys, seed)
        dependencies[new] = {names.get(other, other) for other in graph.dependencies[name]}
    return da.Array(HighLevelGraph(layers, dependencies), names[array.name], array.chunks, meta=array)

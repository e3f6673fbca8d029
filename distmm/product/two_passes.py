"""Arrays that are read in two passes, for a statistic and for a product, without storing their blocks in between."""

from __future__ import annotations

import dask.array as da
from dask.blockwise import Blockwise
from dask.delayed import Delayed
from dask.graph_manipulation import clone

from distmm.product.labelled import Labelled


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
    # Each of these has one task: the array-like that is read, or a single value.
    shared = [name for name, layer in graph.layers.items() if not isinstance(layer, Blockwise)]
    if array.name in shared or any(len(graph.layers[name]) > 1 for name in shared):
        return array
    return clone(array, omit=[Delayed(name, graph, layer=name) for name in shared])

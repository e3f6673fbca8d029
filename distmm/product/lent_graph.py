"""Dask arrays of NumPy arrays, such as those of `dask.array.from_array`: workers read this process's memory.

Dask has the elements of such arrays in its graph. It would send them through the scheduler, which takes a second for a
gigabyte.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from distmm.graph.dask_tasks import Task
from distmm.product.aliasing import coincide
from distmm.transfer import ClientArray, has_gaps, share
from distmm.worker.tasks.loads import load

if TYPE_CHECKING:
    from distributed import Client


def lent(array: da.Array, client: Client) -> da.Array:
    """Return the same Dask array. Its tasks read large NumPy arrays of the graph in the memory of this process."""
    shared: dict[int, ClientArray | None] = {}
    layers = {name: _lent(layer, client, shared) for name, layer in array.dask.layers.items()}
    if not any(shared.values()):
        return array
    return da.Array(HighLevelGraph(layers, array.dask.dependencies), array.name, array.chunks, meta=array)


def whole(array: da.Array) -> np.ndarray | None:
    """Return the NumPy array of which `dask.array.from_array` has made a Dask array; None for any other Dask array."""
    layer = array.dask.layers.get(array.name)
    if not isinstance(layer, MaterializedLayer) or not array.size:
        return None
    blocks = [layer.mapping.get((array.name, *index)) for index in np.ndindex(*array.numblocks)]
    base = getattr(blocks[0], "base", None)
    base = blocks[0] if base is None else base
    if type(base) is not np.ndarray or (base.shape, base.dtype) != (array.shape, array.dtype):
        return None
    places = da.core.slices_from_chunks(array.chunks)
    return base if all(coincide(block, base[place]) for block, place in zip(blocks, places, strict=True)) else None


def _lent(layer: Layer, client: Client, shared: dict[int, ClientArray | None]) -> Layer:
    if not isinstance(layer, MaterializedLayer):
        return layer
    lent = {}
    for key, value in layer.mapping.items():
        if type(value) is np.ndarray and value.ndim > 1 and (part := _part(value, client, shared)) is not None:
            whole = partial(load, index=(slice(None),) * value.ndim, device="cpu")
            lent[key] = Task(key, whole, part)
    mapping = {**layer.mapping, **lent}
    return MaterializedLayer(mapping, layer.annotations, layer.collection_annotations) if lent else layer


def _part(block: Any, client: Client, shared: dict[int, ClientArray | None]) -> ClientArray | None:
    """Describe a block in this process's memory. The blocks of one array have one loan. None if it cannot be lent."""
    base = block.base
    whole = base if isinstance(base, np.ndarray) and base.ndim > 1 and base.flags.c_contiguous else block
    if has_gaps(whole):  # it would be copied
        return None
    if id(whole) not in shared:
        shared[id(whole)] = share(whole, client, f"distmm-client-{uuid.uuid4().hex}")
    loan, address = shared[id(whole)], block.__array_interface__["data"][0]
    return loan and replace(loan, address=address, shape=block.shape, strides=block.strides, dtype=block.dtype)

"""Dask arrays of NumPy arrays, such as those of `dask.array.from_array`: workers read this process's memory.

Dask has the elements of such arrays in its graph. It would send them through the scheduler, which takes a second for a
gigabyte.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer
from distributed import Client

from distmm.graph.dask_tasks import Task
from distmm.transfer import ClientArray, share
from distmm.worker import tasks


def lent(array: da.Array, client: Client) -> da.Array:
    """Return the same Dask array. Its tasks read large NumPy arrays of the graph in the memory of this process."""
    shared: dict[int, ClientArray | None] = {}
    layers = {name: _lent(layer, client, shared) for name, layer in array.dask.layers.items()}
    if not any(shared.values()):
        return array
    return da.Array(HighLevelGraph(layers, array.dask.dependencies), array.name, array.chunks, meta=array)


def _lent(layer: Layer, client: Client, shared: dict[int, ClientArray | None]) -> Layer:
    if not isinstance(layer, MaterializedLayer):
        return layer
    loads = {}
    for key, value in layer.mapping.items():
        if type(value) is np.ndarray and value.ndim > 1 and (part := _part(value, client, shared)) is not None:
            load = partial(tasks.load, index=(slice(None),) * value.ndim, device="cpu")
            loads[key] = Task(key, load, part)
    mapping = {**layer.mapping, **loads}
    return MaterializedLayer(mapping, layer.annotations, layer.collection_annotations) if loads else layer


def _part(block: Any, client: Client, shared: dict[int, ClientArray | None]) -> ClientArray | None:
    """Describe a block in this process's memory. The blocks of one array have one loan. None if it cannot be lent."""
    whole = block if block.base is None else block.base
    if not isinstance(whole, np.ndarray) or whole.ndim < 2 or not whole.flags.c_contiguous:
        return None
    if id(whole) not in shared:
        shared[id(whole)] = share(whole, client, f"distmm-client-{uuid.uuid4().hex}")
    loan, address = shared[id(whole)], block.__array_interface__["data"][0]
    return loan and replace(loan, address=address, shape=block.shape, strides=block.strides, dtype=block.dtype)

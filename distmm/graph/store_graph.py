"""The graph that writes blocks of C to a target: one task for each block.

With `dask.array.store`, a block of a part of an array takes up to three tasks, and one more task waits for all blocks.
Each of these tasks costs a round trip to the scheduler: 3 to 6 ms on GPU clusters.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import dask.array as da
from dask.highlevelgraph import HighLevelGraph

from distmm.graph.dask_tasks import STORES, Task, TaskRef
from distmm.graph.parametric_layer import ParametricLayer
from distmm.graph.placement import Key
from distmm.planning.blocks import slices

__all__ = ["StoreLayer", "stored"]


def stored(
    array: da.Array, region: tuple[slice, ...] | None, target: Any, place: tuple[slice, ...] | None = None
) -> da.Array:
    """Return a lazy array. Each of its blocks is a task that writes a block of `array` to `target`, and returns None.

    Parameters
    ----------
    array : dask.array.Array
    region : tuple of slice, optional
        The part of `array` that is written: it begins and ends between blocks, and is not empty. None: all of it.
    target : object
        Tasks assign blocks to it.
    place : tuple of slice, optional
        Where the region goes in `target`; by default where it is in `array`.
    """
    ranges = tuple(range(len(edges)) for edges in array.chunks)
    if region is not None:
        ranges = tuple(_inside(edges, cut) for edges, cut in zip(array.chunks, region, strict=True))
    chunks = tuple(edges[at.start : at.stop] for edges, at in zip(array.chunks, ranges, strict=True))
    first = tuple(at.start for at in ranges)
    where = region if place is None else place
    begin = (0,) * array.ndim if where is None else tuple(at.start for at in where)
    name = f"{STORES}{uuid.uuid4().hex}"  # no two calls share tasks that write
    layer = StoreLayer(name, array.name, first, chunks, begin, target)
    return da.Array(HighLevelGraph.from_collections(name, layer, [array]), name, chunks, dtype=array.dtype)


def _inside(edges: tuple[int, ...], cut: slice) -> range:
    """Return the indices of the blocks with these edges that lie in the cut; empty ones at its ends do not count."""
    inside = [i for i, at in enumerate(slices(edges)) if cut.start <= at.start < at.stop <= cut.stop]
    return range(inside[0], inside[-1] + 1)


def _store(target: Any, place: tuple[slice, ...], block: Any) -> None:
    """Write a block. Runs on workers."""
    target[place] = block


@dataclass(eq=False, repr=False)
class StoreLayer(ParametricLayer):
    """The tasks that write blocks of an array. `first` is the index of the first block, and `begin` its place."""

    name: str
    source: str
    first: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    begin: tuple[int, ...]
    target: Any

    def get_output_keys(self) -> set[Key]:
        """Keys of all tasks."""
        return {(self.name, *index) for index in product(*(range(len(edges)) for edges in self.chunks))}

    def _tasks(self) -> Iterator[Task]:
        places = [
            [slice(start + at.start, start + at.stop) for at in slices(edges)]
            for start, edges in zip(self.begin, self.chunks, strict=True)
        ]
        for index in product(*(range(len(edges)) for edges in self.chunks)):
            place = tuple(along[i] for along, i in zip(places, index, strict=True))
            block = TaskRef((self.source, *(i + j for i, j in zip(index, self.first, strict=True))))
            yield Task((self.name, *index), _store, self.target, place, block)

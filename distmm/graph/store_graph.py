"""The graph that writes blocks of C to a target: one task for each block.

`dask.array.store` of a part of an array takes three tasks a block, which cut it, write it and pass its None on, and one
more that waits for all of them. Each is a round trip to the scheduler, of 3 to 6 ms on GPU clusters.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import dask.array as da
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from distmm.graph.dask_tasks import STORES, Task, TaskRef
from distmm.graph.parametric_layer import ParametricLayer
from distmm.graph.placement import Key
from distmm.planning.blocks import slices

__all__ = ["StoreLayer", "stored"]


def stored(array: da.Array, region: tuple[slice, ...] | None, target: Any, place: tuple[slice, ...]) -> da.Array:
    """Return the lazy array whose blocks write those of a region of `array` to ``target[place]``. They are None.

    Parameters
    ----------
    array : dask.array.Array
    region : tuple of slice, optional
        Where whole blocks of `array` begin and end; not empty. All of it by default.
    target : object
        Tasks assign blocks to it.
    place : tuple of slice
        Of the region's shape.
    """
    ranges = tuple(range(len(edges)) for edges in array.chunks)
    if region is not None:
        ranges = tuple(_inside(edges, cut) for edges, cut in zip(array.chunks, region, strict=True))
    chunks = tuple(edges[at.start : at.stop] for edges, at in zip(array.chunks, ranges, strict=True))
    first, begin = tuple(at.start for at in ranges), tuple(at.start for at in place)
    name = f"{STORES}{tokenize(array.name, region, target, place)}"
    layer = StoreLayer(name, array.name, first, chunks, begin, target)
    return da.Array(HighLevelGraph.from_collections(name, layer, [array]), name, chunks, dtype=array.dtype)


def _inside(edges: tuple[int, ...], cut: slice) -> range:
    """Return the indices of the blocks with these edges that lie in the cut; empty ones at its ends do not count."""
    inside = [i for i, at in enumerate(slices(edges)) if cut.start <= at.start < at.stop <= cut.stop]
    return range(inside[0], inside[-1] + 1)


def _store(target: Any, place: tuple[slice, ...], block: Any) -> None:
    """Write a block. Runs on workers."""
    target[place] = block


class StoreLayer(ParametricLayer):
    """The tasks that write blocks of an array. `first` is the index of the first block, and `begin` its place."""

    def __init__(
        self,
        name: str,
        source: str,
        first: tuple[int, ...],
        chunks: tuple[tuple[int, ...], ...],
        begin: tuple[int, ...],
        target: Any,
    ) -> None:
        super().__init__()
        self.name, self.source, self.first, self.chunks, self.begin, self.target = (
            name, source, first, chunks, begin, target,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.source, self.first, self.chunks, self.begin, self.target)

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

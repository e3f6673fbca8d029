"""Consumers: the tasks that take finished blocks. All are one type of layer, and differ in what they do with a block.

- `in_chunks` keeps a block as the user's chunks, which are views of it.
- `stored` writes a block to a target. With `dask.array.store`, a block of a part of an array takes up to three tasks,
  and one more task waits for all blocks. Each of these tasks costs a round trip to the scheduler: 3 to 6 ms on GPU
  clusters.
- `results` merges the parts of reduced blocks: one tree for each row of blocks, or each column. A tree's shape depends
  only on the number of blocks, and its tasks take parts in the order of blocks. So the results have the same bits
  whichever part is ready first, and for any number of workers. Parts are small: Dask decides where to merge them.
- `parts_of_blocks` gives the part of each reduced block itself.

A job judges and writes blocks (`distmm.job.wave_graph`).
"""

from __future__ import annotations

import itertools
import operator
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from distmm.graph.dask_tasks import STORES, PlacedTask, SeparateTask, Task, TaskRef, tree
from distmm.graph.parametric_layer import ParametricLayer, with_layer
from distmm.graph.placement import Key, Placement
from distmm.graph.reduced_blocks import Reduced
from distmm.planning.blocks import Wave, slices
from distmm.planning.owners import Chunks
from distmm.planning.plan import Plan
from distmm.worker.tasks import products
from distmm.worker.tasks.epilogue import of_c, of_matrix
from distmm.worker.tasks.reductions import Kinds, merge

# Parts that a task merges. The scheduler takes 0.35 ms for a task. With eight parts, trees add at most one task for
# seven chains, and a part waits for few others.
GROUP = 8

SUFFIX = "-chunks"

Index = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """The indices of a grid, in C order. They are sent as its sizes."""

    sizes: Index

    def __iter__(self) -> Iterator[Index]:
        return itertools.product(*map(range, self.sizes))


@dataclass(eq=False, repr=False)
class ConsumerLayer(ParametricLayer):
    """The tasks of a consumer.

    Parameters
    ----------
    name : str
        The keys of the results are ``(name, *index)``.
    indices : iterable of tuple of int
        Of the results: a `Grid`, or a tuple.
    take : callable
        Takes the key of a result. Yields the tasks that make it from finished blocks, one of them with this key. It is
        sent to the scheduler with the layer.
    """

    name: str
    indices: Iterable[Index]
    take: Callable[[Key], Iterator[Task]]

    def get_output_keys(self) -> set[Key]:
        """Keys of the results."""
        return {(self.name, *index) for index in self.indices}

    def _tasks(self) -> Iterator[Task]:
        for index in self.indices:
            yield from self.take((self.name, *index))


@dataclass(frozen=True)
class Item:
    """Takes an item of each result of a source. An index may have more dimensions than the source."""

    source: str
    item: int
    ndim: int

    def __call__(self, key: Key) -> Iterator[Task]:
        """Yield the tasks of one result."""
        yield Task(key, operator.getitem, TaskRef((self.source, *key[1 : 1 + self.ndim])), self.item)


# Blocks that are kept as the user's chunks


@dataclass(frozen=True)
class View:
    """Takes a chunk of C from its block, on the worker that makes the block. The plan's blocks are unions of chunks."""

    source: str
    plan: Plan
    dropped: tuple[int, ...]

    @cached_property
    def _parts(self) -> list[list[tuple[int, slice]]]:
        """The block of each chunk, and the part of the block that it is, along each dimension of C."""
        assert self.plan.schedule.chunks is not None
        *down, _, across = self.plan.schedule.chunks
        along = (*down, across)
        return [[(at, part) for at, edges in enumerate(blocks) for part in slices(edges)] for blocks in along]

    @cached_property
    def _places(self) -> dict[Index, Placement]:
        """Where the parts of each block are taken."""
        blocking = self.plan.blocking
        return {at: self._place(*at) for at in Grid(tuple(map(len, (*blocking.batch, blocking.m, blocking.n))))}

    def __call__(self, key: Key) -> Iterator[Task]:
        """Yield the tasks of one result."""
        at = of_matrix(key[1:], self.dropped, 0)
        index, part = zip(*(along[i] for along, i in zip(self._parts, at, strict=True)), strict=True)
        block = TaskRef((self.source, *of_c(index, self.dropped)))
        yield PlacedTask(key, products.part, self._places[index], block, of_c(part, self.dropped))

    def _place(self, *index: int) -> Placement:
        schedule, (*batch, i, j) = self.plan.schedule, index
        source = (j, i) if self.plan.blocking.triangle and i < j else (i, j)  # of a mirror image
        owners = tuple(rank for rank, _ in schedule.chains(tuple(batch), *source))
        return Placement(self.source, tuple(batch), *source, schedule.steps, schedule.wave_orders, owners[0], owners)


def in_chunks(blocks: da.Array, plan: Plan, dropped: tuple[int, ...] = ()) -> da.Array:
    """Return an array of a plan's blocks of C as an array of the user's chunks. C lacks the axes that are `dropped`."""
    *cuts, _, n = plan.schedule.cuts
    chunks = of_c((*cuts, n), dropped)
    grid = Grid(tuple(map(len, chunks)))
    layer = ConsumerLayer(blocks.name + SUFFIX, grid, View(blocks.name, plan, dropped))
    return da.Array(with_layer(blocks.dask, layer, blocks.name), layer.name, chunks, meta=blocks)


def product_of(name: str) -> str:
    """Return the name of the product whose blocks or chunks an array has."""
    return name.removesuffix(SUFFIX)


# Blocks that are written


def places_along(chunks: Chunks, begin: Index) -> list[list[slice]]:
    """Return where blocks lie along each dimension of an array if the first one begins at `begin`."""
    return [
        [slice(start + at.start, start + at.stop) for at in slices(edges)]
        for start, edges in zip(begin, chunks, strict=True)
    ]


@dataclass(frozen=True)
class Store:
    """Writes blocks of an array. `first` is the index of the first block, and `begin` its place."""

    source: str
    first: Index
    chunks: Chunks
    begin: Index
    target: Any

    @cached_property
    def _places(self) -> list[list[slice]]:
        return places_along(self.chunks, self.begin)

    def __call__(self, key: Key) -> Iterator[Task]:
        """Yield the tasks of one result."""
        place = tuple(along[at] for along, at in zip(self._places, key[1:], strict=True))
        block = TaskRef((self.source, *map(operator.add, key[1:], self.first)))
        # Fused with the task that makes the block, it would make blocks again that are in the workers' memory.
        yield SeparateTask(key, operator.setitem, self.target, place, block)


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
    ranges = [range(len(edges)) for edges in array.chunks]
    if region is not None:
        ranges = [_inside(edges, cut) for edges, cut in zip(array.chunks, region, strict=True)]
    chunks = tuple(edges[at.start : at.stop] for edges, at in zip(array.chunks, ranges, strict=True))
    first = tuple(at.start for at in ranges)
    where = region if place is None else place
    begin = (0,) * array.ndim if where is None else tuple(at.start for at in where)
    name = f"{STORES}{uuid.uuid4().hex}"  # no two calls share tasks that write
    layer = ConsumerLayer(name, Grid(tuple(map(len, chunks))), Store(array.name, first, chunks, begin, target))
    return da.Array(with_layer(array.dask, layer, array.name), name, chunks, dtype=array.dtype)


def _inside(edges: tuple[int, ...], cut: slice) -> range:
    """Return the indices of the blocks with these edges that lie in the cut; empty ones at its ends do not count."""
    inside = [i for i, at in enumerate(slices(edges)) if cut.start <= at.start < at.stop <= cut.stop]
    return range(inside[0], inside[-1] + 1)


# Blocks that are reduced


@dataclass(frozen=True)
class Merge:
    """Merges the parts of one line of blocks: a row, or a column."""

    product: str
    plan: Plan
    reduced: Reduced

    def __call__(self, key: Key) -> Iterator[Task]:
        """Yield the tasks of a tree, leaves first."""
        (name, *line), blocking = key, self.plan.blocking
        token = name.rpartition("-")[2]
        count = len(blocking.m if self.reduced.down else blocking.n)
        keys, sides = zip(*(self._source(tuple(line), at) for at in range(count)), strict=True)
        for own, made, first in tree(key, keys, GROUP, (f"distmm-merge-{token}", *line)):
            of = None if first is None else sides[first : first + GROUP]
            yield Task(own, merge, self.reduced.reduction, made, of, own == key, self.plan.cluster.device)

    def _source(self, line: Index, at: int) -> tuple[Key, int]:
        """Key of the task that makes the part of a line in its block `at`, and the index of this part in its result."""
        *batch, own = line
        i, j = (at, own) if self.reduced.down else (own, at)
        if self.plan.blocking.triangle and i < j:  # the mirror image of a block that was multiplied
            return (self.product, *batch, j, i), 1
        return (self.product, *batch, i, j), 0


def results(product: str, graph: HighLevelGraph, plan: Plan, reduced: Reduced, kinds: Kinds) -> list[da.Array]:
    """Return the results of a reduction for all lines, as lazy arrays ``(*batch, lines, *shape)`` with one graph.

    Parameters
    ----------
    product : str
        Name of the reduced product.
    graph : HighLevelGraph
        Its graph, of all waves.
    plan : Plan
    reduced : Reduced
    kinds : tuple of (dtype, shape)
        Of one line, for each result of the reduction.
    """
    blocking, token = plan.blocking, product.rpartition("-")[2]
    lines = (*blocking.batch, blocking.n if reduced.down else blocking.m)
    sizes = tuple(map(len, lines))
    merged = ConsumerLayer(f"distmm-merged-{token}", Grid(sizes), Merge(product, plan, reduced))
    whole, arrays = with_layer(graph, merged, product), []
    for number, (dtype, shape) in enumerate(kinds):
        item = Item(merged.name, number, len(lines))
        layer = ConsumerLayer(f"distmm-reduced-{number}-{token}", Grid(sizes + (1,) * len(shape)), item)
        chunks = (*lines, *((size,) for size in shape))
        meta = np.empty((0,) * len(chunks), dtype)
        arrays.append(da.Array(with_layer(whole, layer, merged.name), layer.name, chunks, meta=meta))
    return arrays


def parts_of_blocks(product: str, graph: HighLevelGraph, plan: Plan, wave: Wave) -> dict[Key, Delayed]:
    """Return the part of each block of a wave, lazy, by its indices ``(*batch, i, j)``."""
    indices = [(*batch, i, j) for batch, i, j in plan.blocking.c_indices(wave)]
    # A separate task: if a client kept blocks under the product's keys, the bound on blocks of C would not hold.
    name = f"distmm-part-{product.rpartition('-')[2]}-{wave.index}"
    layer = ConsumerLayer(name, indices, Item(product, 0, len(plan.blocking.batch) + 2))
    whole = with_layer(graph, layer, product)
    return {index: Delayed((name, *index), whole, layer=name) for index in indices}

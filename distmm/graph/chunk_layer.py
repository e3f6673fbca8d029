"""The user's chunks of C as views of its blocks, if blocks are unions of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import dask.array as da
from dask.highlevelgraph import HighLevelGraph

from distmm.graph.dask_tasks import PlacedTask, TaskRef
from distmm.graph.parametric_layer import ParametricLayer
from distmm.graph.placement import Key, Placement
from distmm.planning.blocks import slices
from distmm.planning.owners import Chunks
from distmm.planning.plan import Plan
from distmm.worker import tasks

__all__ = ["in_chunks", "product_of"]

SUFFIX = "-chunks"


@dataclass(eq=False, repr=False)
class ChunkLayer(ParametricLayer):
    """A task for each chunk of C, which takes it from its block, on the worker that makes the block.

    Parameters
    ----------
    name : str
    block : str
        Name of the array of blocks.
    plan : Plan
        Its blocks are unions of chunks.
    """

    name: str
    block: str
    plan: Plan

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.plan.schedule.chunks is not None
        self.rows, _, self.columns = self.plan.schedule.chunks

    def get_output_keys(self) -> set[Key]:
        """Keys of the chunks."""
        return {(self.name, i, j) for i in range(_count(self.rows)) for j in range(_count(self.columns))}

    def __len__(self) -> int:
        return _count(self.rows) * _count(self.columns)

    def _tasks(self) -> Iterator[PlacedTask]:
        down, across = (list(enumerate(_parts(blocks))) for blocks in (self.rows, self.columns))
        places = {at: self._place(*at) for at in product(range(len(self.rows)), range(len(self.columns)))}
        for (i, (row, rows)), (j, (column, columns)) in product(down, across):
            where, block = places[row, column], TaskRef((self.block, row, column))
            yield PlacedTask((self.name, i, j), tasks.part, where, block, (rows, columns))

    def _place(self, i: int, j: int) -> Placement:
        schedule = self.plan.schedule
        source = (j, i) if self.plan.blocking.triangle and i < j else (i, j)  # of a mirror image
        owners = tuple(rank for rank, _ in schedule.chains((), *source))
        return Placement(self.block, (), *source, schedule.steps, schedule.wave_orders, owners[0], owners)


def _count(blocks: Chunks) -> int:
    return sum(map(len, blocks))


def _parts(blocks: Chunks) -> Iterator[tuple[int, slice]]:
    """Yield the block of each chunk, and the part of the block that it is."""
    for index, edges in enumerate(blocks):
        for part in slices(edges):
            yield index, part


def in_chunks(blocks: da.Array, plan: Plan) -> da.Array:
    """Return an array of a plan's blocks of C as an array of the user's chunks."""
    name = blocks.name + SUFFIX
    graph = HighLevelGraph.from_collections(name, ChunkLayer(name, blocks.name, plan), dependencies=[blocks])
    m, _, n = plan.schedule.cuts
    return da.Array(graph, name, (m, n), meta=blocks)


def product_of(name: str) -> str:
    """Return the name of the product whose blocks or chunks an array has."""
    return name.removesuffix(SUFFIX)

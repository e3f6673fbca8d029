"""The user's chunks of C as views of its blocks, if blocks are unions of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import dask.array as da
from dask.highlevelgraph import HighLevelGraph

from distmm.graph.dask_tasks import PlacedTask, TaskRef
from distmm.graph.parametric_layer import ParametricLayer
from distmm.graph.placement import Key, Placement
from distmm.planning.blocks import slices
from distmm.planning.owners import Chunks, Homes
from distmm.planning.schedule import Schedule
from distmm.worker import tasks

__all__ = ["in_chunks", "product_of"]

SUFFIX = "-chunks"


class ChunkLayer(ParametricLayer):
    """A task for each chunk of C, which takes it from its block, on the worker that has made the block.

    Dask would run some of these short tasks on other workers, and send them whole blocks: 67 MB more than the plan's
    99 MB for 2048 x 2048 float64 in chunks of 128.

    Parameters
    ----------
    name : str
    block : str
        Name of the array of blocks.
    rows, columns : Chunks
        Edges of the chunks of each block row, and of each block column.
    ranks : tuple of tuple of int
        Rank that makes each block.
    """

    def __init__(self, name: str, block: str, rows: Chunks, columns: Chunks, ranks: Homes) -> None:
        super().__init__()
        self.name, self.block, self.rows, self.columns, self.ranks = name, block, rows, columns, ranks

    def _parameters(self) -> tuple[Any, ...]:
        return self.name, self.block, self.rows, self.columns, self.ranks

    def get_output_keys(self) -> set[Key]:
        """Keys of the chunks."""
        return {(self.name, i, j) for i in range(_count(self.rows)) for j in range(_count(self.columns))}

    def __len__(self) -> int:
        return _count(self.rows) * _count(self.columns)

    def _tasks(self) -> Iterator[PlacedTask]:
        down, across = (list(enumerate(_parts(blocks))) for blocks in (self.rows, self.columns))
        for (i, (row, rows)), (j, (column, columns)) in product(down, across):
            where = Placement(self.block, (), row, column, 0, 0, self.ranks[row][column])
            yield PlacedTask(
                (self.name, i, j), tasks.chunk_of, where, TaskRef((self.block, row, column)), (rows, columns)
            )


def _count(blocks: Chunks) -> int:
    return sum(map(len, blocks))


def _parts(blocks: Chunks) -> Iterator[tuple[int, slice]]:
    """Yield the block of each chunk, and the part of the block that it is."""
    for index, edges in enumerate(blocks):
        for part in slices(edges):
            yield index, part


def in_chunks(blocks: da.Array, schedule: Schedule) -> da.Array:
    """Return an array of blocks as an array of the user's chunks, which the blocks unite."""
    assert schedule.chunks is not None
    rows, _, columns = schedule.chunks
    triangle = schedule.blocking.triangle
    # A block above the diagonal is the mirror image of one below, on the same worker.
    makers = (
        (schedule.chains((), *((j, i) if triangle and i < j else (i, j)))[0][0] for j in range(len(columns)))
        for i in range(len(rows))
    )
    name = blocks.name + SUFFIX
    layer = ChunkLayer(name, blocks.name, rows, columns, tuple(map(tuple, makers)))
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[blocks])
    chunks = tuple(tuple(edge for edges in each for edge in edges) for each in (rows, columns))
    return da.Array(graph, name, chunks, meta=blocks)


def product_of(name: str) -> str:
    """Return the name of the product whose blocks or chunks an array has."""
    return name.removesuffix(SUFFIX)

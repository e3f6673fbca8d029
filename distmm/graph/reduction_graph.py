"""The Dask graph that merges the parts of a reduced product: one tree for each row of blocks, or each column.

A tree's shape depends only on the number of blocks, and its tasks take parts in the order of blocks. So the results
have the same bits whichever part is ready first, and for any number of workers. Parts are small: Dask decides where to
merge them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from distmm.graph.dask_tasks import List, Task, TaskRef
from distmm.graph.parametric_layer import ParametricLayer, copyable
from distmm.graph.placement import Key
from distmm.graph.product_graph import Reduced
from distmm.planning.blocks import Wave
from distmm.planning.plan import Plan
from distmm.worker import tasks

__all__ = ["GROUP", "MergeLayer", "parts_of_blocks", "results"]

# Parts that a task merges. The scheduler takes 0.35 ms for a task. With eight parts, trees add at most one task for
# seven chains, and a part waits for few others.
GROUP = 8


@dataclass(eq=False, repr=False)
class MergeLayer(ParametricLayer):
    """Trees that merge the parts of all lines. The results of line block l are under ``(name, *batch, l)``."""

    name: str
    product: str
    plan: Plan
    reduced: Reduced

    def get_output_keys(self) -> set[Key]:
        """Keys of the results."""
        return {(self.name, *batch, line) for batch in self.plan.blocking.batches() for line in range(self._lines)}

    def _tasks(self) -> Iterator[Task]:
        for batch in self.plan.blocking.batches():
            for line in range(self._lines):
                yield from self._tree(batch, line)

    @property
    def _lines(self) -> int:
        blocking = self.plan.blocking
        return len(blocking.n if self.reduced.down else blocking.m)

    def _tree(self, batch: tuple[int, ...], line: int) -> Iterator[Task]:
        """Tasks that merge the parts of one line of blocks."""
        blocking, token = self.plan.blocking, self.name.rpartition("-")[2]
        count = len(blocking.m if self.reduced.down else blocking.n)
        keys, sides = zip(*(self._source(batch, line, at) for at in range(count)), strict=True)
        level, of_blocks = 0, True
        while True:
            groups = range(0, len(keys), GROUP)
            last, merged = len(groups) == 1, []
            for number, start in enumerate(groups):
                key = (self.name, *batch, line) if last else (f"distmm-merge-{token}", *batch, line, level, number)
                made = List(*map(TaskRef, keys[start : start + GROUP]))
                yield Task(
                    key,
                    tasks.merge,
                    self.reduced.reduction,
                    made,
                    sides[start : start + GROUP] if of_blocks else None,
                    last,
                    self.plan.cluster.device,
                )
                merged.append(key)
            if last:
                return
            keys, level, of_blocks = tuple(merged), level + 1, False

    def _source(self, batch: tuple[int, ...], line: int, at: int) -> tuple[Key, int]:
        """Key of the task that makes the part of a line in its block `at`, and the index of this part in its result."""
        i, j = (at, line) if self.reduced.down else (line, at)
        if self.plan.blocking.triangle and i < j:  # the mirror image of a block that was multiplied
            return (self.product, *batch, j, i), 1
        return (self.product, *batch, i, j), 0


def results(
    product: str,
    graph: HighLevelGraph,
    plan: Plan,
    reduced: Reduced,
    kinds: Sequence[tuple[np.dtype[Any], tuple[int, ...]]],
) -> list[da.Array]:
    """Return the results of a reduction for all lines, as lazy arrays ``(*batch, lines, *shape)`` with one graph.

    Parameters
    ----------
    product : str
        Name of the reduced product.
    graph : HighLevelGraph
        Its graph, of all waves.
    plan : Plan
    reduced : Reduced
    kinds : sequence of (dtype, shape)
        Of one line, for each result of the reduction.
    """
    blocking, token = plan.blocking, product.rpartition("-")[2]
    merged = f"distmm-merged-{token}"
    layer = MergeLayer(merged, product, plan, reduced)
    layers, dependencies = dict(graph.layers), dict(graph.dependencies)
    layers[merged], dependencies[merged] = layer, {product}
    lines = blocking.n if reduced.down else blocking.m
    arrays = []
    for number, (dtype, shape) in enumerate(kinds):
        name = f"distmm-reduced-{number}-{token}"
        sources = {(name, *key[1:], *(0 for _ in shape)): key for key in layer.get_output_keys()}
        picks = {key: Task(key, operator.getitem, TaskRef(source), number) for key, source in sources.items()}
        whole = copyable(HighLevelGraph({**layers, name: picks}, {**dependencies, name: {merged}}))
        chunks = (*blocking.batch, lines, *((size,) for size in shape))
        arrays.append(da.Array(whole, name, chunks, meta=np.empty((0,) * len(chunks), dtype)))
    return arrays


def parts_of_blocks(product: str, graph: HighLevelGraph, plan: Plan, wave: Wave) -> dict[Key, Delayed]:
    """Return the part of each block of a wave, lazy, by its indices ``(*batch, i, j)``."""
    name = f"distmm-part-{product.rpartition('-')[2]}-{wave.index}"
    keys = [(*batch, i, j) for batch, i, j in plan.blocking.c_indices(wave)]
    # A separate task: if a client kept blocks under the product's keys, the bound on blocks of C would not hold.
    made = {(name, *at): Task((name, *at), operator.getitem, TaskRef((product, *at)), 0) for at in keys}
    whole = HighLevelGraph({**graph.layers, name: made}, {**graph.dependencies, name: {product}})
    return {at: Delayed((name, *at), whole, layer=name) for at in keys}

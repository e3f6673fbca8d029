"""The graph of one wave of a job: chains, sketches for the check, and a task that writes each block.

The chains are those of `distmm.graph.product_graph.ProductLayer`. This layer adds the tasks below. Each runs on the
worker that has its block::

    w[j]     weights from B[0,j]          at the home of B[0,j]; one task for all j with the same home
    Y[p,j]   sketches of B[p,j]           at the home of B[p,j]; one task for all j with the same home
    S[i,p]   S[i,p-1] + A[i,p] Y[p,:]     at the home of A[i,p]
    W[i,j]   check C[i,j] by S[i,last], write it, sync it, mark it    at the owner of C[i,j] (`block_writer`)

If C is reduced, W[i,j] checks and reduces C[i,j], and `RowLayer` merges the reduced blocks of each row.

Results of Y and S also have checksums of the blocks that were read. Only the results of W are sent to the client: some
hundred bytes for each block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from distmm.checking import sketch
from distmm.checking.checksum import checksum_of_input
from distmm.graph.dask_tasks import List, PlacedTask, Task, TaskRef
from distmm.graph.parametric_layer import ParametricLayer
from distmm.graph.placement import Placement
from distmm.job.block_writer import Left, Writer, changed, write
from distmm.job.folded_checksums import Order, fold
from distmm.job.folder import Json
from distmm.job.row_writer import RowWriter, gather, reduce
from distmm.planning.blocks import Wave
from distmm.worker import tasks

__all__ = ["Names", "RowLayer", "WritingLayer"]

Key = tuple[Any, ...]

# Of blocks of B: sketches; checksums; if a reduction needs them, the squared norms of columns; and for each block that
# has changed in memory, the worker.
Right = tuple[list[sketch.Sketch], list[int], list[np.ndarray], dict[int, Json]]


def _of_b(
    where: Placement,
    order: Order,
    blocks: list[Any],
    seed: int,
    columns: tuple[int, ...],
    work: np.dtype | None,
    weights: dict[int, sketch.Weights] | None,
    measure: bool = False,
) -> Right:
    """Return checksums, and sketches if blocks of C are checked, of the blocks of a panel of B with the same home."""
    sums = [checksum_of_input(block, *order) for block in blocks]
    norms = [tasks.squared_norms(block.T) for block in blocks] if measure else []
    made = [] if work is None or weights is None else sketch.of_b(where, blocks, seed, columns, work, weights)
    # Tested after the sketches are made. A bit that flips later only changes the product, which the sketches detect.
    named = {j: changed(f"B[{where.i}, {j}]", block) for j, block in zip(columns, blocks, strict=True)}
    return made, sums, norms, {j: one for j, one in named.items() if one is not None}


def _of_a(
    where: Placement,
    order: Order,
    before: Left | None,
    block: Any,
    right: list[Right],
    work: np.dtype | None,
    seed: tuple[int, int],
    measure: bool = False,
) -> Left:
    """Add the checksums of a panel to those before, and the sketch of its block of A if blocks of C are checked."""
    sketches, sums, norms, spoilt = before or (None, None, None, {})
    new = checksum_of_input(block, *order), *itertools.chain.from_iterable(of_b for _, of_b, _, _ in right)
    sums = fold(sums, new)
    if measure:
        squares = [tasks.squared_norms(block), *itertools.chain.from_iterable(of_b for _, _, of_b, _ in right)]
        norms = squares if norms is None else [*map(np.add, norms, squares)]
    made = None
    if work is not None:
        made = sketch.of_a(where, sketches, block, [of_b for of_b, _, _, _ in right], work, *seed)
    spoilt = {**spoilt, **{at: one for *_, found in right for at, one in found.items()}}
    if (own := changed(f"A[{where.i}, {where.j}]", block)) is not None:
        spoilt[None] = own
    return made, sums, norms, spoilt


@dataclass(frozen=True)
class Names:
    """Names in the keys that a wave's tasks read: blocks of A, B and C, and of C0 if it is added."""

    a: str
    b: str
    c: str
    c0: str | None

    @property
    def arrays(self) -> set[str]:
        """All names that are given."""
        return {name for name in (self.a, self.b, self.c, self.c0) if name is not None}


@dataclass(eq=False, repr=False)
class WritingLayer(ParametricLayer):
    """Sketches and writing tasks for some blocks of a wave."""

    name: str
    names: Names
    writer: Writer
    wave: Wave
    blocks: tuple[tuple[int, int], ...]

    def get_output_keys(self) -> set[Key]:
        """Keys of the writing tasks."""
        return {self.key(i, j) for i, j in self.blocks}

    def key(self, i: int, j: int) -> Key:
        """Key of the task that writes a block."""
        return (self.name, i, j)

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Block columns whose blocks of B have the same home. One task sketches them, to save tasks."""
        homes: dict[int, list[int]] = {}
        for j in sorted({j for _, j in self.blocks}):
            homes.setdefault(self._place(0, j, 0).rank, []).append(j)
        return [tuple(columns) for columns in homes.values()]

    @cached_property
    def steps(self) -> dict[int, tuple[int, int, int]]:
        """Layer of the grid, step of the chain and order (`Placement.order`) to which each panel belongs."""
        plan = self.writer.plan
        parts = plan.schedule.chains((), 0, 0)
        first = self.wave.index * plan.schedule.wave_orders
        steps = ((layer, s, panels) for layer, (_, part) in enumerate(parts) for s, panels in enumerate(part))
        return {p: (layer, s, first + s) for layer, s, panels in steps for p in panels}

    def _place(self, i: int, j: int, panel: int) -> Placement:
        layer, step, order = self.steps[panel]
        owners = tuple(rank for rank, _ in self.writer.plan.schedule.chains((), i, j))
        return Placement(self.names.c, (), i, j, step, order, owners[layer], owners)

    def _tasks(self) -> Iterator[PlacedTask]:
        yield from self._sketches()
        yield from self._writing()

    def _sketches(self) -> Iterator[PlacedTask]:
        writer, names, panels = self.writer, self.names, range(len(self.writer.plan.blocking.k))
        work = None if writer.tolerance is None else writer.tolerance.sketched
        rows = sorted({i for i, _ in self.blocks})
        for p in panels:
            for columns in self.groups:
                blocks = List(*(TaskRef((names.b, p, j)) for j in columns))
                where, weights = self._place(p, columns[0], p), (f"{self.name}-weights", columns[0])
                if p == 0 and work is not None:
                    yield PlacedTask(weights, sketch.weigh, where, blocks, columns, work)
                yield PlacedTask(
                    (f"{self.name}-b", p, columns[0]),
                    _of_b,
                    where,
                    writer.orders["B"],
                    blocks,
                    writer.seed,
                    columns,
                    work,
                    TaskRef(weights) if work is not None else None,
                    writer.needs_norms,
                )
            right = List(*(TaskRef((f"{self.name}-b", p, columns[0])) for columns in self.groups))
            for i in rows:
                before = TaskRef((f"{self.name}-a", i, p - 1)) if p else None
                yield PlacedTask(
                    (f"{self.name}-a", i, p),
                    _of_a,
                    self._place(i, p, p),
                    writer.orders["A"],
                    before,
                    TaskRef((names.a, i, p)),
                    right,
                    work,
                    (writer.seed, i),
                    writer.needs_norms,
                )

    def _writing(self) -> Iterator[PlacedTask]:
        last = len(self.writer.plan.blocking.k) - 1
        judged = self.writer.tolerance is not None
        weights = {j: TaskRef((f"{self.name}-weights", columns[0])) for columns in self.groups for j in columns}
        place = {j: at for at, j in enumerate(weights)}  # in the order of the sketches
        for i, j in self.blocks:
            yield PlacedTask(
                self.key(i, j),
                reduce if isinstance(self.writer, RowWriter) else write,
                self._place(i, j, 0),  # with the priority of the wave's first step: a written block frees memory
                self.writer,
                TaskRef((self.names.c, i, j)),
                TaskRef((f"{self.name}-a", i, last)),
                place[j],
                TaskRef((self.names.c0, i, j)) if self.names.c0 is not None else None,
                weights[j] if judged else None,
            )


@dataclass(eq=False, repr=False)
class RowLayer(ParametricLayer):
    """Tasks that merge the reduced blocks of each row, wave by wave. The last one writes the block row.

    Parameters
    ----------
    name : str
    writer : RowWriter
    rows : tuple of int
        Rows of blocks.
    waves : tuple of (str, range)
        The name of the `WritingLayer` of each wave, and its columns of blocks.
    """

    name: str
    writer: RowWriter
    rows: tuple[int, ...]
    waves: tuple[tuple[str, range], ...]

    def get_output_keys(self) -> set[Key]:
        """Keys of the tasks that write block rows."""
        return {self.key(i, 0) for i in self.rows}

    def key(self, i: int, j: int) -> Key:
        """Key of the task that writes a block row."""
        return (self.name, i, j)

    def __len__(self) -> int:
        return len(self.rows) * len(self.waves)

    def _tasks(self) -> Iterator[Task]:
        for i in self.rows:
            before: list[TaskRef] = []
            for number, (parts, columns) in enumerate(self.waves, 1):
                last = number == len(self.waves)
                key = self.key(i, 0) if last else (f"{self.name}-parts", i, number)
                yield Task(key, gather, self.writer, i, List(*before, *(TaskRef((parts, i, j)) for j in columns)), last)
                before = [TaskRef(key)]

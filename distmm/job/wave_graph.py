"""The graph of one wave of a job: chains, sketches for the check, and a task that writes each block.

The chains are those of `distmm.graph.product_graph.ProductLayer`. A `WriteLayer` adds the tasks below. Each runs on
the worker that has its block::

    w[j]     weights from B[0,j]          at the home of B[0,j]; one task for all j with the same home
    Y[p,j]   sketches of B[p,j]           at the home of B[p,j]; one task for all j with the same home
    S[i,p]   S[i,p-1] + A[i,p] Y[p,:]     at the home of A[i,p]
    W[i,j]   check C[i,j] by S[i,last], write it, sync it, mark it    at the owner of C[i,j]

If a wave has a single block row i, only the task of S[i,p] reads Y[p,j]. It then computes the sketches Y[p,j] whose
blocks of B are on its own worker.

If C is reduced, W[i,j] checks and reduces C[i,j], and `Rows` merges the reduced blocks of each row.

Results of Y and S also have checksums of the blocks that were read. The client gets the results of W alone.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from dask.highlevelgraph import HighLevelGraph
from distributed import Client

from distmm.checking import sketch
from distmm.graph import product_graph
from distmm.graph.consumers import ConsumerLayer
from distmm.graph.dask_tasks import List, PlacedTask, Task, TaskRef
from distmm.graph.parametric_layer import ParametricLayer, one_graph, with_layer
from distmm.graph.placement import Key, Placement
from distmm.job.folder import Json
from distmm.job.inputs import NO_PANEL, Order, fold
from distmm.job.judge import RowOfA, summed
from distmm.job.spec import Spec
from distmm.job.target import Unit
from distmm.job.writer import Writer, gather, take
from distmm.planning.blocks import Wave
from distmm.planning.plan import Plan
from distmm.product.operand_blocks import blocked
from distmm.worker.tasks.epilogue import Epilogue
from distmm.worker.tasks.metrics import NORMED, squared_norms


class PanelOfB(NamedTuple):
    """What is known of some blocks of a panel of B.

    Attributes
    ----------
    sketches : list of Sketch
        Empty if blocks of C are not checked.
    sums : list of int, the checksums of the blocks
    norms : list of array
        The squared norms of columns, if a reduction needs them.
    changed : dict
        By column: what is said of a block that has changed in memory.
    """

    sketches: list[sketch.Sketch]
    sums: list[int]
    norms: list[np.ndarray]
    changed: dict[int | None, Json]


def _weigh(where: Placement, blocks: list[Any], columns: tuple[int, ...], work: np.dtype) -> dict[int, sketch.Weights]:
    """Return the weights of block columns by their blocks in the first panel of B, which have the same home."""
    return {j: sketch.weigh(block, work) for j, block in zip(columns, blocks, strict=True)}


def _of_b(
    where: Placement, order: Order, blocks: list[Any], seed: int, columns: tuple[int, ...], work: np.dtype | None,
    weights: dict[int, sketch.Weights] | None, measure: bool = False,
) -> PanelOfB:  # fmt: skip
    """Return checksums, and sketches if blocks of C are checked, of the blocks of a panel of B with the same home."""
    made = PanelOfB([], [], [], {})
    for j, block in zip(columns, blocks, strict=True):
        if work is not None and weights is not None:
            made.sketches.append(sketch.of_b(block, seed, j, work, weights[j]))
        if measure:
            made.norms.append(squared_norms(block.T))
        made.sums.append(summed(block, order, made.changed, j, f"B[{where.i}, {j}]"))
    return made


def _of_a(
    where: Placement, order: Order, before: RowOfA | None, block: Any, panel: list[PanelOfB], work: np.dtype | None,
    seed: tuple[int, int], measure: bool = False,
) -> RowOfA:  # fmt: skip
    """Add the checksums of a panel to those before, and the sketch of its block of A if blocks of C are checked."""
    before = before or RowOfA(None, NO_PANEL, None, {})
    norms = before.norms
    if measure:
        squares = [squared_norms(block), *itertools.chain.from_iterable(of_b.norms for of_b in panel)]
        norms = squares if norms is None else [*map(np.add, norms, squares)]
    right = list(itertools.chain.from_iterable(of_b.sketches for of_b in panel))
    made = None if work is None else sketch.of_a(before.sketch, block, right, work, *seed)
    found: dict[int | None, Json] = dict(before.changed)
    for of_b in panel:
        found |= of_b.changed
    new = summed(block, order, found, None, f"A[{where.i}, {where.j}]"), *(one for of_b in panel for one in of_b.sums)
    return RowOfA(made, fold(before.sums, new), norms, found)


class Names(NamedTuple):
    """Names in the keys that a wave's tasks read: blocks of A, B and C, and of C0 if it is added."""

    a: str
    b: str
    c: str
    c0: str | None


@dataclass(eq=False, repr=False)
class WriteLayer(ParametricLayer):
    """Sketches for some blocks of a wave, and the tasks that take these blocks."""

    name: str
    names: Names
    writer: Writer
    wave: Wave
    blocks: tuple[tuple[int, int], ...]

    def get_output_keys(self) -> set[Key]:
        """Keys of the tasks that take blocks."""
        return {(self.name, *index) for index in self.blocks}

    def _sketch(self, what: str, *index: int) -> Key:
        """Key of the weights of one of `groups`, of the sketches of B of a group, or of the sketch of a row."""
        return (f"{self.name.replace('write', 'sketch')}-{what}", *index)

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Block columns whose blocks of B have the same home. One task sketches them, to save tasks."""
        homes: dict[int, list[int]] = {}
        for j in sorted({j for _, j in self.blocks}):
            homes.setdefault(self.place(0, j, 0).rank, []).append(j)
        return [tuple(columns) for columns in homes.values()]

    @cached_property
    def steps(self) -> dict[int, tuple[int, int, int]]:
        """Layer of the grid, step of the chain and order (`Placement.order`) to which each panel belongs."""
        plan = self.writer.judge.plan
        parts = plan.schedule.chains((), 0, 0)
        first = self.wave.index * plan.schedule.wave_orders
        steps = ((layer, s, panels) for layer, (_, part) in enumerate(parts) for s, panels in enumerate(part))
        return {p: (layer, s, first + s) for layer, s, panels in steps for p in panels}

    def place(self, i: int, j: int, panel: int) -> Placement:
        """Place a task at the owner of a block of C that reads the panel."""
        layer, step, order = self.steps[panel]
        owners = tuple(rank for rank, _ in self.writer.judge.plan.schedule.chains((), i, j))
        return Placement(self.names.c, (), i, j, step, order, owners[layer], owners)

    def _tasks(self) -> Iterator[PlacedTask]:
        judge, names, reduction = self.writer.judge, self.names, self.writer.judge.contents.reduction
        measure = reduction is not None and reduction.metric in NORMED
        work = None if judge.tolerance is None else judge.tolerance.sketched
        rows, panels = sorted({i for i, _ in self.blocks}), len(judge.plan.blocking.k)
        weights = {g: None if work is None else TaskRef(self._sketch("weights", g[0])) for g in self.groups}
        for p in range(panels):
            panel: list[Task | TaskRef] = []
            for columns in self.groups:
                blocks = List(*(TaskRef((names.b, p, j)) for j in columns))
                where = self.place(p, columns[0], p)
                if p == 0 and work is not None:
                    yield PlacedTask(self._sketch("weights", columns[0]), _weigh, where, blocks, columns, work)
                about = where, judge.orders["B"], blocks, judge.seed, columns, work, weights[columns], measure
                if len(rows) == 1 and where.rank == self.place(rows[0], p, p).rank:
                    panel.append(Task(None, _of_b, *about))
                    continue
                panel.append(TaskRef(key := self._sketch("b", p, columns[0])))
                yield PlacedTask(key, _of_b, *about)
            for i in rows:
                before = TaskRef(self._sketch("a", i, p - 1)) if p else None
                block, seed = TaskRef((names.a, i, p)), (judge.seed, i)
                row = judge.orders["A"], before, block, List(*panel), work, seed, measure
                yield PlacedTask(self._sketch("a", i, p), _of_a, self.place(i, p, p), *row)
        in_order = ((j, weights[columns]) for columns in self.groups for j in columns)
        of_column = {j: (number, given) for number, (j, given) in enumerate(in_order)}
        for i, j in self.blocks:
            number, given = of_column[j]
            row, block = TaskRef(self._sketch("a", i, panels - 1)), TaskRef((names.c, i, j))
            added = TaskRef((names.c0, i, j)) if names.c0 is not None else None
            # with the priority of the wave's first step: a written block frees memory
            where = self.place(i, j, 0)
            yield PlacedTask((self.name, i, j), take, where, self.writer, row, block, number, added, given)


@dataclass(frozen=True)
class Rows:
    """Merges the reduced blocks of a row, wave by wave. The last task writes the block row.

    Parameters
    ----------
    writer : Writer
    waves : tuple of (str, range)
        The name in the keys of the reduced blocks of each wave, and its columns of blocks.
    """

    writer: Writer
    waves: tuple[tuple[str, range], ...]

    def __call__(self, key: Key) -> Iterator[Task]:
        """Yield the tasks of one result."""
        name, i, _ = key
        before: list[TaskRef] = []
        for number, (parts, columns) in enumerate(self.waves, 1):
            last = number == len(self.waves)
            own = key if last else (f"{name}-parts", i, number)
            yield Task(own, gather, self.writer, i, List(*before, *(TaskRef((parts, i, j)) for j in columns)), last)
            before = [TaskRef(own)]


def graph_of(
    product: str, spec: Spec, plan: Plan, waves: tuple[Wave, ...], units: set[Unit], writer: Writer, client: Client
) -> tuple[HighLevelGraph, list[Key]]:
    """Return the graph of some units of a group of waves, and the keys of the tasks that write them.

    Each wave loads matrices under new names, or the blocks of this wave would stay in memory for the next one.
    """
    chains, layers = [], []
    for wave in waves:
        names, graph = _chains(product, spec, plan, wave, writer.run.id, client)
        blocks = tuple((i, j) for _, i, j in plan.blocking.c_indices(wave) if spec.contents.unit(i, j) in units)
        chains.append(graph)
        layers.append(WriteLayer(f"distmm-write-{uuid.uuid4().hex}", names, writer, wave, blocks))
    graph = one_graph(product, chains) if len(chains) > 1 else chains[0]
    for layer in layers:
        graph = with_layer(graph, layer, *filter(None, layer.names))
    if spec.reduction is None:
        (layer,) = layers
        return graph, [(layer.name, *index) for index in layer.blocks]
    made = tuple((each.name, each.wave.columns) for each in layers)
    last = ConsumerLayer(f"distmm-row-{uuid.uuid4().hex}", tuple(sorted(units)), Rows(writer, made))
    return with_layer(graph, last, *(each.name for each in layers)), [(last.name, *index) for index in last.indices]


def _chains(product: str, spec: Spec, plan: Plan, wave: Wave, run: str, client: Client) -> tuple[Names, HighLevelGraph]:
    """Return the graph of a wave's blocks of C, and the names of its arrays."""
    blocking, device = plan.blocking, plan.cluster.device
    a = blocked(spec.a, (blocking.m, blocking.k), device, client, noted=True)
    b = blocked(spec.b, (blocking.k, blocking.n), device, client, noted=True)
    c0 = None if spec.c0 is None else blocked(spec.c0, (blocking.m, blocking.n), "cpu", client, noted=True)
    # On GPUs a block of C stays in GPU memory, for the task that checks and writes it.
    epilogue = Epilogue(spec.dtype, "cupy" if device == "cuda" else "numpy", spec.alpha, spec.beta)
    chains = product_graph.build(product, plan, a, b, epilogue, c0, wave=wave, run=run)
    return Names(a.name, b.name, product, None if c0 is None else c0.name), chains

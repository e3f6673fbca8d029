"""Products of all kinds for the simulations of the scheduler: their plans, and the graphs of tasks that are never run.

`disturbed_cluster.py` sends these graphs to Dask's own scheduler. `simulated.py` plays them without Dask.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph

from distmm.graph.dask_tasks import ProductTask, Task, TaskRef
from distmm.graph.product_graph import build
from distmm.graph.reduced_blocks import Reduced
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.owners import Grid
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import parse
from distmm.worker.tasks.epilogue import Epilogue

__all__ = ["BLOCK", "KINDS", "Drawn", "draw", "graphs", "is_operand", "nbytes", "planned"]

EDGE = 8
DTYPE = np.dtype("f8")
BLOCK = EDGE * EDGE * DTYPE.itemsize

# "kept": a client keeps C. "streamed": tasks read a block each. "transposed": tasks read blocks of two waves, as
# C + C.T. "factor": another product reads C as its A. "written": to a target, wave by wave. "job": the same, but each
# wave is a product of its own. "reduced": the last task of a chain reduces its block; tasks merge the parts of a row.
KINDS = ("kept", "streamed", "transposed", "factor", "written", "job", "reduced")


@dataclass(frozen=True)
class Drawn:
    """One product.

    Attributes
    ----------
    shape : tuple of int
        Blocks of C down, steps, blocks of C across.
    names : tuple of str
        A and B, which other products may read, too.
    symmetric : bool
        Whether it is `gram`: chains for one triangle, and mirrored blocks. It has no B.
    added : bool
        Whether each block of C is added to a block of another array.
    spare : int, optional
        Slots for blocks of C for which workers have memory in addition to those of the plan; without, memory is no
        matter.
    """

    number: int
    kind: str
    grid: Grid
    shape: tuple[int, int, int]
    names: tuple[str, str]
    lookahead: int = 2
    device: Literal["cpu", "cuda"] = "cpu"
    symmetric: bool = False
    added: bool = False
    spare: int | None = None

    @property
    def name(self) -> str:
        """Name of C."""
        return f"distmm-matmul-{self.number}"

    @property
    def leaves(self) -> bool:
        """Whether the client lets each result go when it has it."""
        return self.kind in ("written", "job", "streamed", "transposed")


def draw(rng: random.Random, number: int, workers: int, names: tuple[str, str], most: int = 3) -> Drawn:
    """Draw a product for so many workers, of at most `most` blocks in each direction."""
    shape = rng.randint(1, most), rng.randint(1, most), rng.randint(1, most)
    kind, symmetric = rng.choice(KINDS), rng.random() < 0.25
    if symmetric or kind == "transposed":
        shape = *shape[:2], shape[0]
    layers = 2 if workers % 2 == 0 and shape[1] > 1 and rng.random() < 0.2 else 1
    return Drawn(
        number,
        kind,
        rng.choice(Grid.all_of(workers, layers)),
        shape,
        names,
        rng.randint(1, 3),
        rng.choice(["cpu", "cuda"]),
        symmetric,
        rng.random() < 0.15,
        rng.choice([None, 0, 1]) if kind == "transposed" else None,
    )


@cache
def planned(drawn: Drawn) -> Plan:
    """Return its plan: of small waves, unless all of C stays."""
    rows, depth, columns = drawn.shape
    grid, kind = drawn.grid, drawn.kind
    symmetry: Any = "symmetric" if drawn.symmetric else None
    problem = Problem(rows * EDGE, depth * EDGE, columns * EDGE, DTYPE, symmetry=symmetry)
    cuts = -(-rows // grid.rows), -(-columns // grid.columns)
    cuts = (1, 1) if kind == "kept" else (max(cuts),) * 2 if symmetry else cuts
    text = f"g{grid.rows}x{grid.columns}x{grid.layers} b{EDGE}x{EDGE}x{EDGE} p1 w{cuts[0]}x{cuts[1]} l{drawn.lookahead}"
    plan = Plan(
        problem,
        parse(text, problem),
        ClusterSpec(grid.size, 10**9, drawn.device, 1e9, 1e9, threads=2),
        operands=("loaded", "loaded") if kind in ("written", "job") else ("kept", "kept"),
        result={"written": "out", "job": "out", "reduced": "reduced"}.get(kind, "workers"),  # type: ignore[arg-type]
        streamed=kind in ("streamed", "transposed", "factor"),
    )
    if drawn.spare is None:
        return plan
    return replace(plan, cluster=replace(plan.cluster, memory=plan.peak.worker + drawn.spare * plan.peak.slot))


def graphs(drawn: Drawn) -> Iterator[tuple[list[Any], HighLevelGraph]]:
    """Yield the graphs that a client sends one after another, each with the keys that are wanted of it."""
    plan, name, kind = planned(drawn), drawn.name, drawn.kind
    rows, columns = len(plan.blocking.m), len(plan.blocking.n)
    blocks = [(i, j) for i in range(rows) for j in range(columns)]
    if kind in ("written", "job"):
        # As `out=` and jobs do it: each wave loads A and B under new names. Waves of a job are products of their own.
        for wave in plan.waves:
            of_wave = f"{name}w{wave.index}" if kind == "job" else name
            made = _product(drawn, of_wave, str(wave.index), wave=wave, run=name)
            keys = sorted(made.layers[of_wave].get_output_keys())
            yield _reading(made, of_wave, {(f"write-{of_wave}", *key[1:]): [key] for key in keys})
        return
    made = _product(drawn, name, reduced=Reduced(None) if kind == "reduced" else None)  # type: ignore[arg-type]
    if kind == "kept":
        yield [(name, i, j) for i, j in blocks], made
    elif kind == "factor":
        factor = da.Array(made, name, (plan.blocking.m, plan.blocking.n), dtype=DTYPE)
        second = replace(drawn, kind="kept", shape=(rows, columns, 1), symmetric=False, added=False)
        b = _matrix("F", columns, 1)
        of_factor = build(f"{name}f", planned(second), factor, b, Epilogue(DTYPE, "numpy"))
        yield [(f"{name}f", i, 0) for i in range(rows)], of_factor
    elif kind == "streamed":
        yield _reading(made, name, {(f"sum-{name}", i, j): [(name, i, j)] for i, j in blocks})
    elif kind == "transposed":
        yield _reading(made, name, {(f"both-{name}", i, j): [(name, i, j), (name, j, i)] for i, j in blocks})
    else:  # the task of a block below the diagonal of a symmetric product makes the parts of two rows
        made_of = {at: (max(at), min(at)) if drawn.symmetric else at for at in blocks}
        rows_of = {i: [(name, *made_of[i, j]) for j in range(columns)] for i in range(rows)}
        yield _reading(made, name, {(f"merge-{name}", i): parts for i, parts in rows_of.items()})


def _product(drawn: Drawn, name: str, of_wave: str = "", **options: Any) -> HighLevelGraph:
    """Return the graph of C, or of one wave of it."""
    plan, (rows, depth, columns) = planned(drawn), drawn.shape
    a = _matrix(f"{drawn.names[0]}{of_wave}", rows, depth)
    b = None if drawn.symmetric else _matrix(f"{drawn.names[1]}{of_wave}", depth, columns)
    c0 = _matrix(f"E{of_wave}", rows, columns) if drawn.added else None
    return build(name, plan, a, b, Epilogue(DTYPE, "numpy"), c0=c0, **options)


def _matrix(name: str, rows: int, columns: int) -> da.Array:
    """A matrix whose blocks are loaded; each third one is cut from a larger piece that is read first."""
    graph: dict[Any, Any] = {}
    for i in range(rows):
        for j in range(columns):
            raw = [TaskRef((f"raw-{name}", i, j))] if (i + j) % 3 == 2 else []
            if raw:
                graph[f"raw-{name}", i, j] = Task((f"raw-{name}", i, j), int)
            graph[name, i, j] = Task((name, i, j), int, *raw)
    chunks = ((EDGE,) * rows, (EDGE,) * columns)
    return da.Array(HighLevelGraph.from_collections(name, graph), name, chunks, dtype=DTYPE)


def _reading(made: HighLevelGraph, name: str, reads: dict[Any, list[Any]]) -> tuple[list[Any], HighLevelGraph]:
    """Add tasks that read blocks of a product, and are what is wanted."""
    layer = next(iter(reads))[0]
    tasks = {key: Task(key, int, *map(TaskRef, read)) for key, read in reads.items()}
    return list(reads), HighLevelGraph({**made.layers, layer: tasks}, {**made.dependencies, layer: {name}})


def nbytes(task: Any) -> int:
    """Bytes of a task's result: blocks of A, B and C alone count, and parts of C do not."""
    if isinstance(task, ProductTask):
        return 0 if "reduction" in task.kwargs else BLOCK
    return BLOCK if is_operand(task.key) else 0


def is_operand(key: Any) -> bool:
    """Whether a task makes a block of A or B."""
    return key[0][0] in "ABDEF"

"""Products for `disturbed_cluster.py`: as graphs that a client sends one after another. Their tasks are never run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import dask.array as da
import numpy as np
from dask._expr import HLGExpr
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from distributed.protocol import Serialized, serialize, to_serialize

from distmm.graph.dask_tasks import Task, TaskRef
from distmm.graph.product_graph import Reduced, build, kernel_choice
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import parse
from distmm.worker.tasks import Epilogue

__all__ = ["BLOCK", "KINDS", "Graph", "Request", "request"]

EDGE = 8
DTYPE = np.dtype("f8")
BLOCK = EDGE * EDGE * DTYPE.itemsize

KINDS = ("kept", "streamed", "transposed", "written", "job", "reduced", "gram")


@dataclass(frozen=True)
class Graph:
    """A graph as a client sends it, and the keys whose results it waits for."""

    expr: Serialized
    keys: tuple[Any, ...]


@dataclass
class Request:
    """What a client asks for.

    Attributes
    ----------
    graphs : list of Graph
        Sent in this order, at most two at a time.
    leaves : bool
        Whether the client lets each result go when it has it.
    plan : Plan
    """

    name: str
    kind: str
    graphs: list[Graph]
    leaves: bool
    plan: Plan
    waits: list[set[Any]] = field(default_factory=list)  # for each graph that is sent: keys without a result


def request(number: int, kind: str, workers: int, shape: tuple[int, int, int], names: tuple[str, str]) -> Request:
    """Return a request whose names are its own; but for those of A and B, which it may share with others."""
    plan, graphs = _graphs(number, kind, workers, shape, names)
    return Request(f"c{number}", kind, list(graphs), kind in ("written", "job", "streamed", "transposed"), plan)


@cache
def _graphs(
    number: int, kind: str, workers: int, shape: tuple[int, int, int], names: tuple[str, str]
) -> tuple[Plan, tuple[Graph, ...]]:
    rows, depth, columns = shape
    if kind in ("gram", "transposed"):
        columns = rows
    symmetry: Any = "symmetric" if kind == "gram" else None
    problem = Problem(rows * EDGE, depth * EDGE, columns * EDGE, DTYPE, symmetry=symmetry)
    across = next(r for r in (2, 1) if workers % r == 0)
    waves = "w1" if kind in ("kept", "gram") else f"w{-(-rows // across)}x{-(-columns // (workers // across))}"
    text = f"g{across}x{workers // across}x1 b{EDGE}x{EDGE}x{EDGE} p1 {waves} l{1 + number % 2}"
    plan = Plan(
        problem,
        parse(text, problem),
        ClusterSpec(workers, 10**9, "cpu", 1e9, 1e9),
        operands=("streamed", "streamed") if kind in ("written", "job") else ("kept", "kept"),
        result={"written": "out", "job": "out", "reduced": "reduced"}.get(kind, "workers"),  # type: ignore[arg-type]
        streamed=kind in ("streamed", "transposed"),
    )
    return plan, tuple(_sent(keys, graph) for keys, graph in _asked(number, kind, plan, shape[1], names))


def _asked(
    number: int, kind: str, plan: Plan, depth: int, names: tuple[str, str]
) -> Iterator[tuple[list[Any], HighLevelGraph]]:
    """Graphs with the keys that are wanted of them."""
    choice, epilogue = kernel_choice(plan), Epilogue(DTYPE, "numpy")
    name = f"distmm-matmul-{number}"
    rows, columns = len(plan.blocking.m), len(plan.blocking.n)
    reads: dict[Any, list[Any]] = {}
    a: da.Array
    b: da.Array | None
    if kind in ("written", "job"):
        # As `out=` and jobs do it: each wave loads A and B under new names. Waves of a job are products of their own.
        for wave in plan.waves:
            of_wave = f"{name}w{wave.index}" if kind == "job" else name
            a, b = _matrix(f"{names[0]}{wave.index}", rows, depth), _matrix(f"{names[1]}{wave.index}", depth, columns)
            made = build(of_wave, plan, a, b, choice, epilogue, wave=wave, run=name)
            reads = {(f"write-{of_wave}", i, j): [(of_wave, i, j)] for _, i, j in plan.blocking.c_indices(wave)}
            yield list(reads), _reading(made, of_wave, reads)
        return
    a, b = _matrix(names[0], rows, depth), None if kind == "gram" else _matrix(names[1], depth, columns)
    reduced = Reduced(None) if kind == "reduced" else None  # type: ignore[arg-type]
    made = build(name, plan, a, b, choice, epilogue, reduced=reduced)
    if kind in ("kept", "gram"):
        yield [(name, i, j) for i in range(rows) for j in range(columns)], made
    elif kind == "streamed":
        reads = {(f"sum-{number}", i, j): [(name, i, j)] for i in range(rows) for j in range(columns)}
        yield list(reads), _reading(made, name, reads)
    elif kind == "transposed":  # C + C.T: its tasks read blocks of several waves
        reads = {(f"both-{number}", i, j): [(name, i, j), (name, j, i)] for i in range(rows) for j in range(columns)}
        yield list(reads), _reading(made, name, reads)
    else:
        reads = {(f"merge-{number}", i): [(name, i, j) for j in range(columns)] for i in range(rows)}
        yield list(reads), _reading(made, name, reads)


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


def _reading(made: HighLevelGraph, name: str, reads: dict[Any, list[Any]]) -> HighLevelGraph:
    """Add tasks that read blocks of a product."""
    layer = next(iter(reads))[0]
    tasks = {key: Task(key, int, *map(TaskRef, read)) for key, read in reads.items()}
    return HighLevelGraph({**made.layers, layer: tasks}, {**made.dependencies, layer: {name}})


def _sent(keys: list[Any], graph: HighLevelGraph) -> Graph:
    return Graph(Serialized(*serialize(to_serialize(HLGExpr(graph)), on_error="raise")), tuple(flatten([keys])))

"""What a blocked product costs: bytes moved, tasks and seconds, from sizes alone; `memory.py` has its peak.

The model counts what the graph does by construction (see `distmm.graph.product_graph` and
`distmm.scheduler.lookahead`): stationary C, one chain a block of C, 2-D block-cyclic
homes, and blocks of A and B of at most `lookahead` steps in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from distmm.planning import overlap_model
from distmm.planning.cluster_spec import SCHEDULER_SECONDS, ClusterSpec, Residence
from distmm.planning.geometry import Blocking, Grid, Problem, Wave, accumulator_dtype
from distmm.planning.layout import Layout, Traffic
from distmm.planning.overlap_model import Resource, leaving, sum_seconds

__all__ = ["CHAIN_SECONDS", "Cost", "Peak", "cost", "least_seconds"]

# Time that the scheduler takes to make a task of a new graph, before it hands out the first one: 60 to 90 us for making
# and ordering them, and our plugin's part.
INSERT_SECONDS = 0.15e-3

# Idle time of a worker around one task: measured at 256 tasks a GPU with one task at a time.
TASK_GAP_SECONDS = 3.4e-3

# On GPU clusters, from the call to the first product, beside the making of the tasks: 36 ms in all were measured on two
# H200 for 96 tasks with a plan that took 13.
START_SECONDS = 20e-3

# Time from the end of one step to the start of the next in a single chain (the round trip to the scheduler), measured.
CHAIN_SECONDS = 6e-3

# CPU time that one task takes of Dask in all, on CPU clusters: scheduler, connection, and the worker's event loop
# beside two products. Rough: 264 tasks fewer saved 12 ms each on two busy cores, fewer additions of C included.
CPU_TASK_SECONDS = 8e-3


class Peak(NamedTuple):
    """Bytes at the peak, and what workers keep to so that there are no more.

    Attributes
    ----------
    worker : int
        Largest sum of blocks on one worker: its blocks of C, those being written or not yet freed, its own blocks of A
        and B as far as they are there, and copies from other workers for as many steps as the lookahead.
    host : int
        On GPU clusters: host memory for each GPU, for blocks on their way to and from it and for results that stay.
    places : int or None
        Blocks of C that a worker may have begun and not yet got rid of (`distmm.scheduler.output_slots`); None where
        they stay, or one wave is all.
    prepared : int
        Elements of A and B that a GPU worker keeps in the kernel's own format (`distmm.worker.gpu.Prepared`).
    """

    worker: int
    host: int
    places: int | None
    prepared: int


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one product; bytes and seconds.

    Attributes
    ----------
    bytes_moved : int
        Sum of the blocks of A and B sent between workers, each sent once to each worker that needs it in each wave,
        and of the partial blocks of C where k is split.
    bytes_bound : int
        The same for one wave on a full grid with every block at its home: ``mk (columns - 1) + kn (rows - 1)``
        elements, and ``mn (layers - 1)`` accumulators. Of a symmetric product half of the latter; its first and last
        blocks have fewer users, so that it stays below.
    peak_bytes, peak_host_bytes : int
        See `Peak`.
    tasks : int
        Product tasks in the graph; those that mirror blocks of a symmetric product are not counted here.
    seconds : float
        The largest of arithmetic, transfers, loading, storing and scheduling, which `bound_by` names, and what nothing
        hides; on CPU clusters their sum.
    """

    bytes_moved: int
    bytes_bound: int
    peak_bytes: int
    peak_host_bytes: int
    tasks: int
    seconds: float
    bound_by: Resource


def cost(
    layout: Layout,
    waves: tuple[Wave, ...],
    cluster: ClusterSpec,
    operands: tuple[Residence, Residence],
    result: Literal["workers", "host", "out"],
    lookahead: int,
    peak: Peak,
) -> Cost:
    """Predict what a product costs on `cluster`.

    Parameters
    ----------
    layout : Layout
    waves : tuple of Wave
    cluster : ClusterSpec
    operands : pair of {"resident", "streamed", "whole"}
        Where A and B are.
    result : {"workers", "host", "out"}
        Where finished blocks of C stay: in the memory where they were made, in host memory beside the GPU, or elsewhere
        (a file, or the client's memory).
    lookahead : int
        Steps whose blocks of A and B may be in memory at once.
    peak : Peak
        From `distmm.planning.memory.peak`.
    """
    problem, grid = layout.problem, layout.grid
    alike = [(count, wave, layout.operand_bytes(wave)) for count, wave in _alike(waves)]
    seconds = _seconds(layout, waves, alike, cluster, operands, result, lookahead)
    bound_by = max(seconds, key=lambda name: seconds[name])
    a_items = problem.m * problem.k * math.prod(problem.a_batch)
    b_items = problem.k * problem.n * math.prod(problem.b_batch)
    summed = (layout.layers - 1) * layout.blocking.c_elements * accumulator_dtype(problem.dtype).itemsize
    between = a_items * (grid.columns - 1) + b_items * (grid.rows - 1)
    return Cost(
        bytes_moved=summed + sum(count * int(traffic.received.sum()) for count, _, traffic in alike),
        bytes_bound=between * problem.dtype.itemsize + summed,
        peak_bytes=peak.worker,
        peak_host_bytes=peak.host,
        tasks=layout.blocking.tasks(grid.layers),
        seconds=_together(layout, waves, cluster, result, lookahead, seconds)
        + _exposed(layout, waves, cluster, seconds),
        bound_by=bound_by,
    )


def least_seconds(
    problem: Problem,
    blocking: Blocking,
    grid: Grid,
    cluster: ClusterSpec,
    operands: tuple[Residence, Residence],
    result: Literal["workers", "host", "out"],
    wave_cuts: tuple[int, int, int],
    lookahead: int,
) -> float:
    """Return a lower bound of the seconds that `cost` predicts, from numbers of blocks alone.

    Nothing travels between workers, each operand is loaded once, and all workers that have a chain are busy all the
    time.
    """
    waves = blocking.count_waves(wave_cuts, (grid.rows, grid.columns))
    busy = max(1, min(grid.size, blocking.whole.c_blocks * grid.layers))
    per_element = problem.element_flops / cluster.rate + len(blocking.k) * sum_seconds(problem, cluster)
    arithmetic = per_element * blocking.c_elements / busy
    scheduler = _graph_tasks(blocking, grid) * SCHEDULER_SECONDS
    insert = _insert_seconds(problem, blocking, grid, waves)
    if cluster.device == "cpu":
        return (max(arithmetic, scheduler) + insert) * (1 - 1e-9)  # rounding
    sizes = (
        problem.m * math.prod(problem.a_batch),
        (problem.symmetry is None) * problem.n * math.prod(problem.b_batch),
    )
    loaded = sum(size for size, where in zip(sizes, operands, strict=True) if where != "resident") * problem.k
    loading = loaded * problem.dtype.itemsize / grid.size / cluster.load
    exposed = insert + START_SECONDS + loading / blocking.chain_steps(grid.layers) / waves
    seconds: dict[Resource, float] = {
        "arithmetic": arithmetic,
        "transfers": 0.0,
        "loading": loading,
        "storing": leaving(blocking, result) * blocking.c_elements * problem.dtype.itemsize / grid.size / cluster.load,
        "scheduler": scheduler,
    }
    together = overlap_model.together(problem, blocking, grid, cluster, result, waves, lookahead, seconds)
    return (together + exposed) * (1 - 1e-9)


def _alike(waves: tuple[Wave, ...]) -> list[tuple[int, Wave]]:
    """One wave of each shape, and how many there are."""
    shapes: dict[tuple[int, int, int, bool], list[Wave]] = {}
    for wave in waves:
        shapes.setdefault((len(wave.batches), len(wave.rows), len(wave.columns), wave.triangle), []).append(wave)
    return [(len(same), same[0]) for same in shapes.values()]


def _seconds(
    layout: Layout,
    waves: tuple[Wave, ...],
    alike: list[tuple[int, Wave, Traffic]],
    cluster: ClusterSpec,
    operands: tuple[Residence, Residence],
    result: Literal["workers", "host", "out"],
    lookahead: int,
) -> dict[Resource, float]:
    """Seconds that each resource is busy.

    A step takes as long as its products or its transfers, whichever is longer, as the other hides behind it.
    """
    steps, busiest = layout.steps, layout.busiest
    arithmetic = transfers = loading = storing = 0.0
    per_element = layout.depth * layout.problem.element_flops / max(1, layout.problem.k) / cluster.rate
    per_element += math.ceil(len(layout.blocking.k) / layout.layers) * sum_seconds(layout.problem, cluster)
    gone = leaving(layout.blocking, result)
    # On CPU clusters nothing hides behind products: what counts is all that a worker receives, in whatever step.
    ahead = max(1, min(steps, lookahead - 1)) if cluster.device == "cuda" else max(1, steps)
    for count, wave, traffic in alike:
        elements = float(layout.c_bytes(wave, 1, layout.layers).max())
        if cluster.device == "cpu":  # each thread has cores of its own, which nobody uses if there are fewer chains
            chains = max(1, math.ceil(wave.c_blocks / layout.grid.rows / layout.grid.columns))
            elements *= math.ceil(chains / cluster.threads) * cluster.threads / chains
        arithmetic += count * elements * per_element
        received, sent, *_ = traffic if ahead >= steps else layout.operand_bytes(wave, slice(0, ahead))
        transfers += count * steps / ahead * float(max(received.max(), sent.max())) / cluster.link
        loaded = sum(x for x, where in zip(traffic.homes, operands, strict=True) if where != "resident")
        loading += count * float(np.max(loaded)) / cluster.load
        if cluster.device == "cuda" and gone:
            owned = layout.c_bytes(wave, layout.problem.dtype.itemsize, 1)
            storing += count * gone * float(owned.max()) / cluster.load
    gaps = busiest * steps * TASK_GAP_SECONDS
    if cluster.device == "cuda":  # while a task waits for Dask, the products of the other threads' tasks run
        arithmetic = max(arithmetic, (arithmetic + gaps) / cluster.threads)
    else:
        arithmetic += gaps / cluster.threads
    if busiest == len(waves):  # one chain a worker: nothing runs between the end of a step and the start of the next
        arithmetic += len(waves) * (steps - 1) * CHAIN_SECONDS
    return {
        "arithmetic": arithmetic,
        "transfers": transfers,
        "loading": loading,
        "storing": storing,
        "scheduler": _graph_tasks(layout.blocking, layout.grid) * SCHEDULER_SECONDS,
    }


def _together(
    layout: Layout,
    waves: tuple[Wave, ...],
    cluster: ClusterSpec,
    result: Literal["workers", "host", "out"],
    lookahead: int,
    seconds: dict[Resource, float],
) -> float:
    """Seconds that the resources take side by side: those of the one that takes longest, and until C is stored.

    On CPU clusters the cores that multiply also load, send and receive, and run Dask: there they add up.
    """
    problem, blocking, grid = layout.problem, layout.blocking, layout.grid
    if cluster.device == "cuda":
        return overlap_model.together(problem, blocking, grid, cluster, result, len(waves), lookahead, seconds)
    reads = sum((len(wave.rows) + len(wave.columns)) * len(wave.batches) for wave in waves) * len(blocking.k)
    tasks = blocking.tasks(grid.layers) + reads
    return sum(seconds.values()) + tasks * CPU_TASK_SECONDS / cluster.workers / cluster.threads


def _exposed(layout: Layout, waves: tuple[Wave, ...], cluster: ClusterSpec, seconds: dict[Resource, float]) -> float:
    """Seconds that nothing hides, before the first product and in the sums over layers.

    The transfers of the first step and the making of the first wave's tasks; on GPUs also the loads of the first step.
    """
    problem, blocking = layout.problem, layout.blocking
    m, _, n = blocking.largest
    block = m * n * math.prod(map(max, blocking.batch))
    sums = layout.layers // 2 * block * accumulator_dtype(problem.dtype).itemsize / cluster.link
    exposed = seconds["transfers"] / layout.steps / len(waves) + sums
    exposed += _insert_seconds(problem, blocking, layout.grid, len(waves))
    if cluster.device == "cuda":
        exposed += START_SECONDS + seconds["loading"] / layout.steps / len(waves)
    return exposed


def _insert_seconds(problem: Problem, blocking: Blocking, grid: Grid, waves: int) -> float:
    """Seconds in which the scheduler makes the tasks of the first of `waves`, those that load A and B included."""
    lines = len(blocking.m) + (0 if problem.symmetry else len(blocking.n))
    loads = lines * len(blocking.k) * math.prod(map(len, blocking.batch))
    return (_graph_tasks(blocking, grid) + loads) / waves * INSERT_SECONDS


def _graph_tasks(blocking: Blocking, grid: Grid) -> int:
    """Count the tasks of all products, and of the mirror images of a symmetric one."""
    return blocking.tasks(grid.layers) + blocking.mirrored(blocking.whole)

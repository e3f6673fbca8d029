"""A plan: how a product is cut into blocks, which worker owns which, and what that will take.

Pure: worker count, memory and rates are arguments; nothing here talks to a cluster or a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from distmm.cost import LOOKAHEAD, ClusterSpec, Cost, cost, shortest_task
from distmm.errors import DoesNotFitError, InputError
from distmm.geometry import Blocking, Grid, Problem, Wave, even_edges

__all__ = ["LOOKAHEAD", "PRECISIONS", "Plan", "make_plan"]

PRECISIONS = ("highest", "high", "medium", "ieee")

# Edge of the textbook kernel's tile. Blocks that are multiples of it leave no partial tile inside the matrix, and
# with k cut at multiples of it the bits of C do not depend on the cut.
TILE = 32

# Blocks of C a worker and dimension that are tried, and steps along k. One chain a worker cannot hide transfers and
# the scheduler's round trip behind other chains; more than 8 x 8 chains only add tasks.
CHAINS = (1, 2, 4, 8)
STEPS = (1, 2, 4, 8, 16, 32, 64)

# Idle time of a worker around one task, measured at 256 tasks a GPU.
TASK_GAP_SECONDS = 3.4e-3

# Time from the end of one step to the start of the next in a single chain (the round trip to the scheduler), measured.
CHAIN_SECONDS = 6e-3


@dataclass(frozen=True)
class Plan:
    """What will be done: the blocks, their owners, the kernel, and the predicted cost.

    A plan holds no data and does nothing: `distmm.matmul` builds the graph that it describes.
    """

    problem: Problem
    blocking: Blocking
    grid: Grid
    cluster: ClusterSpec
    precision: str = "highest"
    kernel: str | None = None
    resident: tuple[bool, bool] = (False, False)  # A and B are in the workers' memory already
    lookahead: int = LOOKAHEAD  # steps whose blocks of A and B may be in memory at once
    wave_cuts: tuple[int, int, int] = (1, 1, 1)  # waves along the batch blocks, block rows and block columns of C

    @cached_property
    def cost(self) -> Cost:
        """Bytes, peak memory, tasks and seconds (see `distmm.cost.Cost`)."""
        return cost(self.problem, self.blocking, self.grid, self.cluster, self.resident)

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Edges (m, k, n) of the largest block."""
        return self.blocking.largest

    @cached_property
    def waves(self) -> tuple[Wave, ...]:
        """What is computed together, in this order: the blocks of C of one wave fit into the workers' memory."""
        return self.blocking.waves(self.wave_cuts, (self.grid.rows, self.grid.columns))

    @property
    def bytes_moved(self) -> int:
        """Bytes that workers will send one another."""
        return self.cost.bytes_moved

    def validate(self) -> None:
        """Refuse a plan that cannot fit.

        Raises
        ------
        DoesNotFitError
            If a worker would hold more than it may: says how much is short and how many workers would do.
        """
        peak, have = self.cost.peak_bytes, self.cluster.memory
        if peak <= have:
            return
        enough = math.ceil(self.cluster.workers * peak / max(1, have))
        what = "GPUs" if self.cluster.device == "cuda" else "workers"
        raise DoesNotFitError(
            f"this product needs {peak / 1e9:.3g} GB on each of {self.cluster.workers} {what}, "
            f"{have / 1e9:.3g} GB is free there: short by {(peak - have) / 1e9:.3g} GB; use about {enough} {what}, "
            f"more memory for each, or smaller blocks (now {'x'.join(map(str, self.block_shape))})"
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as a table of label and value."""
        p, b, c = self.problem, self.blocking, self.cost
        m, k, n = b.largest
        what = "GPUs" if self.cluster.device == "cuda" else "CPU workers"
        batch = f" x {math.prod(p.batch)} (batch {p.batch})" if p.batch else ""
        chained = f", {b.panels} panels a task" if b.panels > 1 else ""
        return [
            ("product", f"{p.m} x {p.k} times {p.k} x {p.n}{batch}, {p.dtype}, {p.flops:.3g} operations"),
            ("kernel", f"{self.kernel or 'automatic'}, precision {self.precision}"),
            ("workers", f"{self.grid.rows} x {self.grid.columns} {what}"),
            ("blocks", f"{m} x {k} x {n} (m x k x n), {b.c_blocks} blocks of C, {len(b.steps)} steps each{chained}"),
            ("tasks", f"{c.tasks}"),
            ("memory", f"{c.peak_bytes / 1e9:.3g} GB a worker at the peak, {self.cluster.memory / 1e9:.3g} GB free"),
            ("moved", f"{c.bytes_moved / 1e9:.3g} GB between workers (2-D bound {c.bytes_bound / 1e9:.3g} GB)"),
            ("time", f"about {c.seconds:.2g} s, bound by {c.bound_by}"),
        ]

    def __str__(self) -> str:
        p = self.problem
        batch = "".join(f"{x}x" for x in p.batch)
        return (
            f"distmm {batch}{p.m}x{p.k}x{p.n} {p.dtype}: {self.grid.rows}x{self.grid.columns} workers, "
            f"blocks {'x'.join(map(str, self.block_shape))}, {self.cost.tasks} tasks"
        )


def make_plan(
    problem: Problem,
    cluster: ClusterSpec,
    *,
    blocking: Blocking | None = None,
    edges: tuple[int, int, int] | None = None,
    multiples: tuple[int, int, int] = (TILE, TILE, TILE),
    precision: str = "highest",
    kernel: str | None = None,
    resident: tuple[bool, bool] = (False, False),
) -> Plan:
    """Choose blocks and grid for a product.

    Parameters
    ----------
    problem : Problem
    cluster : ClusterSpec
    blocking : Blocking, optional
        Blocks that are given (the user's chunks); only the grid and the panels a task are chosen then.
    edges : tuple of int, optional
        Block edges (m, k, n) that the user asks for.
    multiples : tuple of int, optional
        Chosen edges are multiples of these (the kernel's tile, or the chunks of a file).
    precision, kernel : str, optional
        Passed through to the workers' kernel selection.
    resident : tuple of bool
        Whether A and B are in the workers' memory already.

    Raises
    ------
    InputError
        For an unknown precision, or block edges that are not positive.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    if cluster.workers < 1:
        raise InputError("the cluster has no workers: start some, or give the address of a cluster that has")
    if edges is not None:
        if len(edges) != 3 or any(int(e) != e or e < 1 for e in edges):
            raise InputError(f"blocks {edges}: give three positive edges, those of m, k and n")
        blocking = _cut(problem, edges)
    if blocking is not None:
        candidates: Iterator[tuple[Blocking, Grid]] = iter(
            [_with_grid(problem, _long_enough(problem, blocking, cluster), cluster)]
        )
    else:
        candidates = _candidates(problem, cluster, multiples)
    plans = (Plan(problem, b, g, cluster, precision, kernel, resident) for b, g in candidates)
    return min(plans, key=_score)


def _cut(problem: Problem, edges: tuple[int, int, int]) -> Blocking:
    m, k, n = (even_edges(size, edge) for size, edge in zip((problem.m, problem.k, problem.n), edges, strict=True))
    return Blocking(m, k, n, tuple(even_edges(size, max(1, size)) for size in problem.batch))


def _with_grid(problem: Problem, blocking: Blocking, cluster: ClusterSpec) -> tuple[Blocking, Grid]:
    """Choose the grid with the least work on its busiest worker, then with the fewest bytes to move."""

    def load(grid: Grid) -> tuple[float, int]:
        busiest = math.ceil(len(blocking.m) / grid.rows) * math.ceil(len(blocking.n) / grid.columns)
        busiest = max(busiest, math.ceil(blocking.c_blocks / cluster.workers))
        return busiest, problem.m * problem.k * (grid.columns - 1) + problem.k * problem.n * (grid.rows - 1)

    return blocking, min(Grid.all_of(cluster.workers), key=load)


def _long_enough(problem: Problem, blocking: Blocking, cluster: ClusterSpec) -> Blocking:
    """Give each task as many consecutive panels as it takes to outlast the scheduler."""
    panels_all = len(blocking.k)
    seconds = problem.flops / cluster.rate / max(1, blocking.c_blocks * panels_all)
    # Never the whole chain: its inputs would all be in memory at once.
    panels = min(math.ceil(shortest_task(cluster.workers) / max(seconds, 1e-9)), max(1, panels_all // 4))
    return Blocking(blocking.m, blocking.k, blocking.n, blocking.batch, panels)


def _candidates(
    problem: Problem, cluster: ClusterSpec, multiples: tuple[int, int, int]
) -> Iterator[tuple[Blocking, Grid]]:
    def bytes_between(grid: Grid) -> int:
        return problem.m * (grid.columns - 1) + problem.n * (grid.rows - 1)

    seen = set()
    for grid in sorted(Grid.all_of(cluster.workers), key=bytes_between)[:2]:
        for chains in (0, *CHAINS):  # 0: one block of C, for products that are not worth spreading
            for steps in STEPS:
                counts = (chains * grid.rows or 1, steps, chains * grid.columns or 1)
                edges = tuple(
                    max(1, min(size, math.ceil(math.ceil(size / count) / multiple) * multiple))
                    for size, count, multiple in zip((problem.m, problem.k, problem.n), counts, multiples, strict=True)
                )
                if (edges, grid) not in seen:
                    seen.add((edges, grid))
                    yield _cut(problem, (edges[0], edges[1], edges[2])), grid


def _score(plan: Plan) -> tuple[float, float]:
    """Bytes over the memory limit, then predicted seconds with what the cost model leaves out: gaps and start-up."""
    c, cluster = plan.cost, plan.cluster
    per_worker = plan.blocking.c_blocks / cluster.workers
    gaps = c.tasks / min(cluster.workers, max(1, plan.blocking.c_blocks)) * TASK_GAP_SECONDS
    # With one chain a worker nothing runs while the next step's inputs travel.
    exposed = (
        (c.bytes_moved / cluster.workers / cluster.link + (len(plan.blocking.steps) - 1) * CHAIN_SECONDS)
        if per_worker < 2
        else 0.0
    )
    m, k, n = plan.block_shape
    first_panel = (m * k + k * n) * plan.problem.dtype.itemsize / cluster.link
    return max(0, c.peak_bytes - cluster.memory), c.seconds + gaps + exposed + first_panel

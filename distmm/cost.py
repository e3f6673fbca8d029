"""What a blocked product costs: bytes moved, peak memory, tasks and seconds, from sizes alone.

The model counts what the graph does by construction (see `distmm.graph`): stationary C, one chain a block of C, 2-D
block-cyclic homes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from distmm.geometry import Blocking, Grid, Problem, accumulator_dtype, operand_batch

__all__ = ["LOOKAHEAD", "SCHEDULER_SECONDS", "ClusterSpec", "Cost", "cost", "operand_bytes_moved", "shortest_task"]

# Steps whose copies of remote blocks are on a worker at once. A chain asks for the inputs of step k when step k - 1 is
# done, and copies are dropped after their last use there, one round trip later: 2 to 3 steps measured. Where workers
# starve for CPU, chains drift further apart; the hard limit is the row of A and the column of B that a worker needs.
LOOKAHEAD = 4

# CPU time of the Dask scheduler for one task: 0.30 to 0.40 ms measured with 2 to 64 workers.
SCHEDULER_SECONDS = 0.35e-3


@dataclass(frozen=True)
class ClusterSpec:
    """What a plan needs to know of a cluster.

    Parameters
    ----------
    workers : int
        Worker processes; on GPU clusters one a GPU.
    memory : int
        Bytes that blocks may take on each worker (GPU memory on GPU clusters).
    device : {"cpu", "cuda"}
        Where the products run.
    rate : float
        FLOP/s of one worker's kernel on blocks of the product's type.
    link : float
        Bytes/s that a worker receives from its peers.
    """

    workers: int
    memory: int
    device: Literal["cpu", "cuda"]
    rate: float
    link: float


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one product; bytes and seconds.

    Attributes
    ----------
    bytes_moved : int
        Sum of the blocks of A and B sent between workers, each sent once to each worker that needs it.
    bytes_bound : int
        The same for a full grid with every block at its home: ``mk (columns - 1) + kn (rows - 1)`` elements.
    peak_bytes : int
        Largest sum of blocks on one worker: its own blocks of A, B and C, the block being written, and `LOOKAHEAD`
        steps of copies from other workers.
    tasks : int
        Product tasks in the graph.
    seconds : float
        The largest of arithmetic, transfers and scheduling; `bound_by` names it.
    """

    bytes_moved: int
    bytes_bound: int
    peak_bytes: int
    tasks: int
    seconds: float
    bound_by: Literal["arithmetic", "transfers", "scheduler"]


def shortest_task(workers: int) -> float:
    """Shortest task, in seconds, that leaves the scheduler 70 % idle: ``workers * 0.35 ms / 0.3``."""
    return workers * SCHEDULER_SECONDS / 0.3


def operand_bytes_moved(problem: Problem, blocking: Blocking, grid: Grid, itemsizes: tuple[int, int]) -> Counter[int]:
    """Bytes of A and B that each rank receives, every block coming from its home once."""
    received: Counter[int] = Counter()
    sent: set[tuple[object, ...]] = set()

    def send(block: tuple[str, tuple[int, ...], int, int], ranks: set[int], size: int) -> None:
        _, at, row, column = block
        for rank in ranks - {grid.owner(row, column, at)}:
            if (block, rank) not in sent:
                sent.add((block, rank))
                received[rank] += size

    # Block indices that differ by a multiple of the grid have the same owner, so one of each residue is enough.
    columns = range(min(grid.columns, len(blocking.n)))
    rows = range(min(grid.rows, len(blocking.m)))
    for b in blocking.batches():
        at_a, at_b = operand_batch(b, problem.a_batch), operand_batch(b, problem.b_batch)
        a_item = _matrices(blocking, b, problem.a_batch) * itemsizes[0]
        b_item = _matrices(blocking, b, problem.b_batch) * itemsizes[1]
        for p, depth in enumerate(blocking.k):
            for i, height in enumerate(blocking.m):
                send(("A", at_a, i, p), {grid.owner(i, j, b) for j in columns}, height * depth * a_item)
            for j, width in enumerate(blocking.n):
                send(("B", at_b, p, j), {grid.owner(i, j, b) for i in rows}, depth * width * b_item)
    return received


def _matrices(blocking: Blocking, index: tuple[int, ...], own: tuple[int, ...]) -> int:
    """Matrices in an operand's batch block: C's, along the dimensions that the operand has and does not broadcast."""
    offset = len(index) - len(own)
    return math.prod(blocking.batch[offset + d][index[offset + d]] for d, length in enumerate(own) if length != 1)


def owned_bytes(problem: Problem, blocking: Blocking, grid: Grid, resident: tuple[bool, bool]) -> Counter[int]:
    """Bytes of the blocks that live on each rank: C in accumulators, A and B unless they are in memory already."""
    item, accumulator = problem.dtype.itemsize, accumulator_dtype(problem.dtype).itemsize
    owned: Counter[int] = Counter()
    counted: set[tuple[str, tuple[int, ...]]] = set()
    for b, i, j in blocking.c_indices():
        owned[grid.owner(i, j, b)] += (
            blocking.m[i] * blocking.n[j] * _matrices(blocking, b, problem.batch) * accumulator
        )
    for b in blocking.batches():
        for name, own, rows, columns, there in (
            ("A", problem.a_batch, blocking.m, blocking.k, resident[0]),
            ("B", problem.b_batch, blocking.k, blocking.n, resident[1]),
        ):
            at = operand_batch(b, own)
            if there or (name, at) in counted:
                continue
            counted.add((name, at))
            size = _matrices(blocking, b, own) * item
            for r, height in enumerate(rows):
                for c, width in enumerate(columns):
                    owned[grid.owner(r, c, at)] += height * width * size
    return owned


def cost(
    problem: Problem,
    blocking: Blocking,
    grid: Grid,
    cluster: ClusterSpec,
    resident: tuple[bool, bool] = (False, False),
) -> Cost:
    """Predict what `blocking` on `grid` costs on `cluster`; `resident`: A and B are in its memory already."""
    item = problem.dtype.itemsize
    work: Counter[int] = Counter()
    for b, i, j in blocking.c_indices():
        work[grid.owner(i, j, b)] += blocking.m[i] * blocking.n[j] * _matrices(blocking, b, problem.batch)
    received = operand_bytes_moved(problem, blocking, grid, (item, item))
    most_received, steps = max(received.values(), default=0), len(blocking.steps)
    m, _, n = blocking.largest
    largest_block = m * n * math.prod(map(max, blocking.batch)) * accumulator_dtype(problem.dtype).itemsize
    a_items = problem.m * problem.k * math.prod(problem.a_batch)
    b_items = problem.k * problem.n * math.prod(problem.b_batch)
    seconds: dict[Literal["arithmetic", "transfers", "scheduler"], float] = {
        "arithmetic": max(work.values()) * problem.flops / max(1, math.prod(problem.shape)) / cluster.rate,
        "transfers": most_received / cluster.link,
        "scheduler": blocking.tasks * SCHEDULER_SECONDS,
    }
    bound_by = max(seconds, key=lambda name: seconds[name])
    return Cost(
        bytes_moved=sum(received.values()),
        bytes_bound=(a_items * (grid.columns - 1) + b_items * (grid.rows - 1)) * item,
        peak_bytes=max(owned_bytes(problem, blocking, grid, resident).values())
        + largest_block
        + math.ceil(most_received * min(LOOKAHEAD, steps) / steps),
        tasks=blocking.tasks,
        seconds=seconds[bound_by],
        bound_by=bound_by,
    )

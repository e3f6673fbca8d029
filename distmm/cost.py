"""What a blocked product costs: bytes moved, peak memory, tasks and seconds, from sizes alone.

The model counts what the graph does by construction (see `distmm.graph` and `distmm.runtime.window`): stationary C,
one chain a block of C, 2-D block-cyclic homes, and blocks of A and B of at most `lookahead` steps in memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np

from distmm.geometry import Wave, accumulator_dtype
from distmm.layout import Layout

__all__ = ["LOOKAHEAD", "SCHEDULER_SECONDS", "ClusterSpec", "Cost", "Residence", "cost", "shortest_task"]

# Steps whose blocks of A and B may be in memory at once: while one computes, the blocks of the next one travel.
LOOKAHEAD = 2

# CPU time of the Dask scheduler for one task: 0.30 to 0.40 ms measured with 2 to 64 workers.
SCHEDULER_SECONDS = 0.35e-3

# Time that the scheduler takes to make a task of a new graph, before it hands out the first one: 60 to 90 us for making
# and ordering them, and our plugin's part.
INSERT_SECONDS = 0.15e-3

# Idle time of a worker around one task: measured at 256 tasks a GPU with one task at a time. With several at a time
# the next product waits on the GPU's queue already.
TASK_GAP_SECONDS = 3.4e-3

# Time from the end of one step to the start of the next in a single chain (the round trip to the scheduler), measured.
CHAIN_SECONDS = 6e-3

# CPU time that one task takes of Dask in all, on CPU clusters: scheduler, connection, and the worker's event loop
# beside two products. Rough: 264 tasks fewer saved 12 ms each on two busy cores, fewer additions of C included.
CPU_TASK_SECONDS = 8e-3

# Time until a block is freed after its last use: 6 ms on an idle cluster, 25 ms seen where processes starve for CPU.
RELEASE_SECONDS = 25e-3

# Where an operand is: in the workers' memory before and after; brought for its steps alone; or, made by tasks that
# others need too, in the workers' memory from its making to its last use.
Residence = Literal["resident", "streamed", "whole"]


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
        Bytes/s that a worker receives from its peers, and sends.
    load : float
        Bytes/s at which a worker brings blocks of A and B that are in no worker's memory.
    host_memory : int, optional
        Bytes of host memory that a GPU worker may take; not limited where it is not known.
    threads : int
        Tasks that a worker runs at a time.
    prepared : float
        Bytes of a block in the kernel's own format, kept beside the block, for each byte of the block.
    granule : int
        Cuts of k at its multiples leave the bits of the kernel's results as they are.
    """

    workers: int
    memory: int
    device: Literal["cpu", "cuda"]
    rate: float
    link: float
    load: float = math.inf
    host_memory: int | None = None
    threads: int = 1
    prepared: float = 0.0
    granule: int = 32


def shortest_task(workers: int) -> float:
    """Shortest task, in seconds, that leaves the scheduler 70 % idle: ``workers * 0.35 ms / 0.3``."""
    return workers * SCHEDULER_SECONDS / 0.3


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
    peak_bytes : int
        Largest sum of blocks on one worker: its blocks of C, those being written or not yet freed, its own blocks of A
        and B as far as they are there, and copies from other workers for as many steps as the lookahead.
    peak_host_bytes : int
        On GPU clusters: host memory for each GPU, for blocks on their way to and from it and for results that stay.
    tasks : int
        Product tasks in the graph; those that mirror blocks of a symmetric product are not counted here.
    seconds : float
        The largest of arithmetic, transfers, loading and scheduling, which `bound_by` names, and what nothing hides; on
        CPU clusters their sum.
    """

    bytes_moved: int
    bytes_bound: int
    peak_bytes: int
    peak_host_bytes: int
    tasks: int
    seconds: float
    bound_by: Literal["arithmetic", "transfers", "loading", "scheduler"]


def cost(
    layout: Layout,
    waves: tuple[Wave, ...],
    cluster: ClusterSpec,
    operands: tuple[Residence, Residence],
    result: Literal["workers", "host", "out"],
    lookahead: int,
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
    """
    problem, blocking, grid = layout.problem, layout.blocking, layout.grid
    item, accumulator = problem.dtype.itemsize, accumulator_dtype(problem.dtype).itemsize
    layers, steps = len(layout.parts), max(map(len, layout.parts))
    batch_edges = math.prod(map(max, blocking.batch))
    m, k, n = blocking.largest
    largest = max(waves, key=lambda wave: wave.c_blocks)  # the first of them

    # Memory: the fullest window of the largest wave.
    block = m * n * batch_edges
    received, _, homes, both = layout.operand_bytes(largest, slice(0, lookahead))
    held = layout.c_bytes(largest, accumulator, layers) + layout.mirror_bytes(largest, item) + received
    every = layout.operand_bytes(largest) if "whole" in operands or cluster.prepared else None
    wholes = homes if every is None else every.homes
    if every is not None and "streamed" not in operands:
        both = every.both
    held += ((received + both) * cluster.prepared).astype(np.int64)
    for where, at_home, whole in zip(operands, homes, wholes, strict=True):
        if where != "resident":
            held += at_home if where == "streamed" else whole
        held += ((at_home if where == "streamed" else whole) * cluster.prepared).astype(np.int64)
    if result == "out" and len(waves) > 1:  # finished blocks of a wave are being written while the next one begins
        held += layout.c_bytes(largest, item, 1)
    if result == "workers" and len(waves) > 1:
        others = [wave for wave in waves if wave is not largest]
        held += np.sum([layout.c_bytes(wave, item, 1) + layout.mirror_bytes(wave, item) for wave in others], axis=0)
    busiest = layout.busiest
    tasks, mirrors = blocking.tasks(grid.layers), sum(map(blocking.mirrored, waves))
    # The D that a task has continued is freed by way of the scheduler: meanwhile short tasks write others.
    task_seconds = problem.element_flops * blocking.c_elements / cluster.rate / max(1, tasks)
    freed_late = math.ceil(RELEASE_SECONDS / max(task_seconds, 1e-9)) if steps > 1 else 0
    writing = min(cluster.threads + freed_late, max(1, busiest))
    host = np.zeros(grid.size, np.int64)
    if cluster.device == "cuda":
        on_the_way = [block] * (result != "workers")
        on_the_way += [m * k * batch_edges] * (operands[0] == "streamed") + [k * n * batch_edges] * (
            operands[1] == "streamed"
        )
        host += max(on_the_way, default=0) * item * cluster.threads
        if result == "host":
            host += np.sum([layout.c_bytes(wave, item, 1) + layout.mirror_bytes(wave, item) for wave in waves], axis=0)

    # Time: a step takes as long as its products or its transfers, whichever is longer, as the other hides behind it.
    arithmetic = transfers = loading = 0.0
    moved = summed = (layers - 1) * blocking.c_elements * accumulator
    depth = max(sum(blocking.k[p] for step in part for p in step) for part in layout.parts)
    per_element = problem.element_flops / max(1, problem.k)
    ahead = max(1, min(steps, lookahead - 1))
    shapes: defaultdict[tuple[int, int, int, bool], list[Wave]] = defaultdict(list)
    for wave in waves:
        shapes[len(wave.batches), len(wave.rows), len(wave.columns), wave.triangle].append(wave)
    for alike in shapes.values():
        chains = max(1, math.ceil(alike[0].c_blocks / grid.rows / grid.columns))
        # Each thread of a CPU worker has cores of its own, which nobody uses when there are fewer chains than threads.
        slots = math.ceil(chains / cluster.threads) * cluster.threads if cluster.device == "cpu" else chains
        flops = float(layout.c_bytes(alike[0], 1, layers).max()) * depth * per_element * slots / chains
        arithmetic += len(alike) * flops / cluster.rate
        received, sent, *_ = layout.operand_bytes(alike[0], slice(0, ahead))
        transfers += len(alike) * steps / ahead * float(max(received.max(), sent.max())) / cluster.link
        received, _, homes, _ = layout.operand_bytes(alike[0])
        moved += len(alike) * int(received.sum())
        loaded = sum(x for x, where in zip(homes, operands, strict=True) if where != "resident")
        loading += len(alike) * float(np.max(loaded)) / cluster.load
    arithmetic += busiest * steps * TASK_GAP_SECONDS / cluster.threads
    if busiest == len(waves):  # one chain a worker: nothing runs between the end of a step and the start of the next
        arithmetic += len(waves) * (steps - 1) * CHAIN_SECONDS
    seconds: dict[Literal["arithmetic", "transfers", "loading", "scheduler"], float] = {
        "arithmetic": arithmetic,
        "transfers": transfers,
        "loading": loading,
        "scheduler": (tasks + mirrors) * SCHEDULER_SECONDS,
    }
    bound_by = max(seconds, key=lambda name: seconds[name])
    longest = seconds[bound_by]
    if cluster.device == "cpu":  # the cores that multiply also load, send and receive, and run Dask
        reads = sum((len(wave.rows) + len(wave.columns)) * len(wave.batches) for wave in waves) * len(blocking.k)
        longest = sum(seconds.values()) + (tasks + reads) * CPU_TASK_SECONDS / cluster.workers / cluster.threads
    lines = len(blocking.m) + (0 if problem.symmetry else len(blocking.n))
    loads = lines * len(blocking.k) * math.prod(map(len, blocking.batch))
    exposed = transfers / steps / len(waves) + layers // 2 * block * accumulator / cluster.link
    exposed += (tasks + mirrors + loads) / len(waves) * INSERT_SECONDS
    if cluster.device == "cuda":  # nothing hides the loads of the first step, nor the way of the last block to the host
        exposed += loading / steps / len(waves)
        exposed += block * item / cluster.load if result != "workers" else 0.0
    a_items = problem.m * problem.k * math.prod(problem.a_batch)
    b_items = problem.k * problem.n * math.prod(problem.b_batch)
    return Cost(
        bytes_moved=moved,
        bytes_bound=(a_items * (grid.columns - 1) + b_items * (grid.rows - 1)) * item + summed,
        peak_bytes=int(held.max()) + writing * block * accumulator,
        peak_host_bytes=int(host.max()),
        tasks=tasks,
        seconds=longest + exposed,
        bound_by=bound_by,
    )

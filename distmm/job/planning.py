"""The plan of a job: A and B are read from files step by step, and C is written to disk wave by wave.

Plans assume files in the page cache (`LOADS`). Disks and networks are slower, and so is the decompression of some
chunks: `read_rate` measures how fast workers read A and B from their files. A file that is in the page cache during the
measurement may not be there during the job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from distributed import Client, Worker

from distmm.all_workers import workers_of
from distmm.clusters.measured import measured_once
from distmm.errors import DeviceMemoryError
from distmm.job.folder import Json
from distmm.job.reduction import Reduction
from distmm.job.spec import Spec
from distmm.planning.early_end import LONG_SECONDS
from distmm.planning.plan import Plan
from distmm.product.operand import Operand
from distmm.product.reduction_limits import bytes_widened
from distmm.product.request import PlanRequest, plan_for, plan_reduced
from distmm.product.resources import FileJob
from distmm.product.smaller_plan import smaller_plan
from distmm.storage.matrix import Matrix
from distmm.worker.tasks.kernel_choice import LARGE, KernelChoice, kernel_facts, kernel_for
from distmm.worker.tasks.loads import load

# Share of the free memory that the plan does not use. It is for blocks that are being sent or written, which the plan
# does not count. 0.13 was measured on CPU workers with large blocks.
SPARE = 0.2

# Rate in bytes/s at which blocks of A and B are read from files in the page cache. On CPU workers a thread also makes
# the sketches: reading 8 MB took 3.8 ms, and its sketches 3 ms. The threads of a GPU worker read pieces into pinned
# memory: 10 GB/s for a block, two blocks at a time. Lower measured rates replace these (`distmm.job.planning`).
LOADS = {"cpu": 1.2e9, "cuda": 1e10}

# Bytes of host memory for the blocks of a GPU, if the planner has a choice. Up to six blocks of C are being written at
# a time, and a thread writes 2 GB in a second.
GPU_HOST_MEMORY = 12 * 2**30


def request(spec: Spec, manifest: Json | None = None, run_seconds: float | None = None) -> PlanRequest:
    """Return the planning request of a job. Only a plan for the `hardware` of the choices needs no client.

    Parameters
    ----------
    spec : Spec
    manifest : dict, optional
        Of a job that is resumed. It keeps its blocks. If k is split into layers, it keeps its whole plan, because the
        bits of C depend on the split.
    run_seconds : float, optional
        Seconds after which a run may be stopped.

    Returns
    -------
    PlanRequest
    """
    blocks, plan = spec.choices.blocks, spec.choices.plan
    if manifest is not None:
        blocks, plan = tuple(manifest["blocks"]), manifest["plan"] if manifest["layers"] > 1 else plan
    choices = replace(spec.choices, blocks=blocks, plan=None if plan is None else str(plan))
    job = FileJob(SPARE, LOADS, GPU_HOST_MEMORY, _load, read_rate)
    return PlanRequest(spec.problem, spec.a, spec.b, choices, written=True, job=job, run_seconds=run_seconds)


# Small blocks of C that are joined to one: at most so many, of so many bytes together (as many as are written during a
# sync). Each worker has at least so many joined blocks.
JOINED, JOINED_BYTES, BLOCKS = 32, 4 << 20, 16


def plan(spec: Spec, asked: PlanRequest, client: Client | None, joins: bool = True) -> Plan:
    """Plan a job. A long job has short waves, so that a run that ends early loses little work.

    If the job `joins` small blocks of C, several of them are one block of the plan. Tasks, messages and syncs of a
    small block would take longer than its product.
    """
    made = beside_parts(spec, asked, client)
    joins = joins and spec.reduction is None and asked.choices.plan is None
    if joins and (edges := joined(made, spec.dtype.itemsize)) != made.block_shape:
        wide = replace(asked, choices=replace(asked.choices, blocks=edges), is_trial=True)
        if not (fits := beside_parts(spec, wide, client)).shortfall:
            made, asked = replace(fits, fewest=made.fewest), replace(wide, is_trial=False)
    if asked.run_seconds is not None or made.shortfall or made.cost.seconds < LONG_SECONDS:
        return made
    return beside_parts(spec, replace(asked, run_seconds=made.cost.seconds), client)


def joined(plan: Plan, itemsize: int) -> tuple[int, int, int]:
    """Return the edges of blocks that several small blocks of C are joined to. Others keep their edges."""
    m, k, n = plan.block_shape
    rows, columns = len(plan.blocking.m), len(plan.blocking.n)
    fit = JOINED_BYTES // max(1, m * n * itemsize)
    most = max(1, min(JOINED, fit, rows * columns // (BLOCKS * plan.cluster.workers)))
    across = max(1, min(most, columns))
    down = max(1, min(most // across, rows))
    return m * down, k, n * across


def smaller(
    spec: Spec, manifest: Json, client: Client, full: Plan, error: DeviceMemoryError, before: int
) -> tuple[Plan, str]:
    """Plan the rest of a job with less memory (`distmm.product.smaller_plan.smaller_plan`).

    The block edges stay the same, so that finished blocks can be kept. The plan has smaller waves, less lookahead, or
    fewer panels in a task. If k is split, there is no such plan: the bits of C depend on how it is split.
    """

    def within(most: int) -> Plan | None:
        if manifest["layers"] > 1:
            return None
        asked = request(spec, manifest)
        return beside_parts(spec, replace(asked, choices=replace(asked.choices, plan=None), most=most), client)

    remedy = "start over with smaller blocks (--overwrite, --blocks)"
    return smaller_plan(full, error, before, within, "the job continues", remedy)


def beside_parts(spec: Spec, asked: PlanRequest, client: Client | None) -> Plan:
    """Plan a job. If C is reduced, its parts have memory of their own, and blocks have the rest."""
    if spec.reduction is None:
        return plan_for(asked, client)
    parts = partial(bytes_of_parts, spec.reduction, spec)
    return plan_reduced(lambda kept: plan_for(replace(asked, kept=kept), client), parts)


def bytes_of_parts(reduction: Reduction, spec: Spec, plan: Plan) -> int:
    """Return the bytes of the reduced blocks of a wave, of their merged rows, and of the rows that are being merged.

    A task that merges a row has the row's new part, and possibly the arrays that it writes.
    """
    of_block, of_row = reduction.bytes_of_parts(spec.dtype, plan)
    largest, cluster = max(plan.waves, key=lambda wave: wave.c_blocks), plan.cluster
    widened = 0 if reduction.metric is None else bytes_widened(plan)
    return widened + largest.c_blocks * of_block + (len(largest.rows) + 2 * cluster.threads * cluster.workers) * of_row


def _load(choice: KernelChoice) -> None:
    """Import the modules that tasks of a job need, and have BLAS allocate its buffers. Runs on workers."""
    from distmm.job import wave_graph  # noqa: F401

    if "no kernel" not in kernel_facts(choice):
        kernel_for(choice, LARGE, LARGE, LARGE, ())
    np.ones((64, 64)) @ np.ones((64, 64))


# Bytes of a piece, or a chunk if that is larger. A disk with 100 MB/s reads a piece in 40 ms.
PIECE_BYTES = 1 << 22

# A thread begins no further piece after this time, or after this number of pieces.
ENOUGH_SECONDS, MOST_PIECES = 0.2, 16

# Largest number of workers that read concurrently. It is enough to measure the rate of a shared disk.
MOST_READERS = 16


def read_rate(
    client: Client | None, operand: Operand, device: Literal["cpu", "cuda"], threads: int = 1
) -> float | None:
    """Return the rate in bytes/s at which each worker reads blocks of an operand to `device` while all workers read.

    It is measured once for each set of workers. None if the measurement fails; it is then not repeated. Without a
    client, this process reads as one worker with `threads`. None for arrays of this process.
    """
    if not isinstance(matrix := operand.source, Matrix):
        return None
    name = f"the rate of reading {matrix.path}"
    if client is None:
        return measured_once(None, name, (threads, device), partial(_of_threads, matrix, device, threads, 1, 0))
    workers = sorted(workers_of(client))
    ranks = {address: rank for rank, address in enumerate(workers[:MOST_READERS])}

    def slowest() -> float:
        return float(min(client.run(_read, ranks, matrix, device, workers=list(ranks)).values()))

    return measured_once(client, name, (frozenset(workers), device), slowest)


def _read(ranks: dict[str, int], matrix: Matrix, device: Literal["cpu", "cuda"], dask_worker: Worker) -> float:
    """Return the bytes/s of all threads of this worker, which read different parts. Runs on workers."""
    return _of_threads(matrix, device, dask_worker.state.nthreads, len(ranks), ranks[dask_worker.address])


def _of_threads(matrix: Matrix, device: Literal["cpu", "cuda"], threads: int, workers: int, rank: int) -> float:
    """Return the bytes/s of all threads of one worker."""

    def of_thread(reader: int) -> float:
        size, begun = 0, time.perf_counter()
        for index in pieces(matrix, workers * threads, reader):
            size += load(matrix, index, device).nbytes
            if time.perf_counter() - begun > ENOUGH_SECONDS:
                break
        return size / max(time.perf_counter() - begun, 1e-9)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(of_thread, range(rank * threads, (rank + 1) * threads)))


def pieces(matrix: Matrix, readers: int, reader: int) -> Iterator[tuple[slice, slice]]:
    """Yield the pieces of a matrix for one of several readers. Pieces are whole chunks, and each has one reader.

    If there are fewer pieces than readers, some readers read the same piece.
    """
    (rows, columns), item = matrix.shape, matrix.dtype.itemsize
    height, width = matrix.chunks or (1, columns)
    width = min(columns, width * max(1, PIECE_BYTES // (height * width * item)))
    height = min(rows, height * max(1, PIECE_BYTES // (height * width * item)))
    across = math.ceil(columns / width)
    count = math.ceil(rows / height) * across
    for number in range(reader % count, count, max(1, min(readers, count)))[:MOST_PIECES]:
        i, j = number // across * height, number % across * width
        yield slice(i, min(rows, i + height)), slice(j, min(columns, j + width))

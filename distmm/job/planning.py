"""What the plan of a job takes into account: A and B are read step by step, and C goes to the disk in waves."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from distributed import Client

from distmm.api.operands import Operand
from distmm.api.plan_request import FileJob, PlanRequest, plan_for
from distmm.api.wishes import Wishes
from distmm.clusters import cluster
from distmm.job.folder import Json
from distmm.job.read_rate import read_rate
from distmm.job.reduction import Reduction
from distmm.job.spec import Spec
from distmm.planning.early_end import LONG_SECONDS
from distmm.planning.plan import Plan
from distmm.storage.matrix import Matrix
from distmm.worker.tasks import KernelChoice, kernel_facts
from distmm.worker.tasks.kernel_choice import LARGE, kernel_for

__all__ = ["bytes_of_parts", "plan", "planned", "request"]

# Part of the free memory that is left for blocks on the wire and on their way to the disk, which the plan does not
# count: 0.13 measured on CPU workers with large blocks.
SPARE = 0.2

# Parts of the memory that are tried for what a reduction keeps of blocks and rows: the first one that is enough. A plan
# with less memory has smaller waves, of which less is kept.
ROOM = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 15 / 16)

# Bytes/s at which blocks of A and B are read from files that are in memory. A thread of a CPU worker makes their
# sketches too: 3.8 and 3 ms for 8 MB were measured. The threads of a GPU worker read pieces into pinned memory:
# 10 GB/s a block, two blocks at a time. Where workers read more slowly, plans count with that (`distmm.job.read_rate`).
LOADS = {"cpu": 1.2e9, "cuda": 1e10}

# Bytes of host memory that a GPU's blocks take, if there is a choice: up to six blocks of C are on their way at a time,
# and one of 2 GB takes a thread a second to write.
GPU_HOST_MEMORY = 12 * 2**30


def request(
    spec: Spec,
    device: cluster.Device,
    blocks: tuple[int, int, int] | None,
    manifest: Json | None,
    text: str | None,
    run_seconds: float | None = None,
) -> PlanRequest:
    """Ask for the plan of a job, of which a run may be stopped after `run_seconds`.

    Where k is split into layers, the bits of C depend on that, and a job that goes on keeps the whole plan.
    """
    if manifest is not None:
        blocks, text = tuple(manifest["blocks"]), manifest["plan"] if manifest["layers"] > 1 else text
    wishes = Wishes(spec.precision, spec.kernel, device, blocks, text, reproducible=spec.reproducible)
    job = FileJob(SPARE, LOADS, GPU_HOST_MEMORY, _load, _read_rate)
    return PlanRequest(spec.problem, spec.a, spec.b, wishes, written=True, job=job, run_seconds=run_seconds)


def plan(spec: Spec, asked: PlanRequest, client: Client) -> Plan:
    """Plan a job: one that takes long in short waves, so that a run that ends early loses little of its work."""
    made = planned(spec, asked, client)
    if asked.run_seconds is not None or made.shortfall or made.cost.seconds < LONG_SECONDS:
        return made
    return planned(spec, replace(asked, run_seconds=made.cost.seconds), client)


def planned(spec: Spec, asked: PlanRequest, client: Client) -> Plan:
    """Plan a job; where C is reduced, with room for the parts of its blocks in host memory."""
    if spec.reduction is None:
        return plan_for(asked, client)
    made = plan_for(replace(asked, kept=0), client)
    memory = made.cluster.memory if made.cluster.device == "cpu" else made.cluster.host_memory
    for share in ROOM:
        if memory is None:
            break
        room = int(memory * share) * made.cluster.workers
        made = plan_for(replace(asked, kept=room), client)
        if made.shortfall or bytes_of_parts(spec.reduction, spec, made) <= room:
            return made
    return plan_for(replace(asked, kept=bytes_of_parts(spec.reduction, spec, made)), client)


def bytes_of_parts(reduction: Reduction, spec: Spec, plan: Plan) -> int:
    """Bytes of what the blocks of a wave leave, of what their rows have so far, and of rows that are put together now.

    A task that does so has the new part of its row, and may have the arrays that it writes.
    """
    of_block, of_row = reduction.bytes_of_parts(spec.dtype, plan)
    largest, cluster = max(plan.waves, key=lambda wave: wave.c_blocks), plan.cluster
    return largest.c_blocks * of_block + (len(largest.rows) + 2 * cluster.threads * cluster.workers) * of_row


def _read_rate(client: Client, operand: Operand, device: Literal["cpu", "cuda"]) -> float | None:
    """Ask the workers how fast they read an operand; None for arrays of the program."""
    return read_rate(client, operand.source, device) if isinstance(operand.source, Matrix) else None


def _load(choice: KernelChoice) -> None:
    """Import what tasks of a job need, and have BLAS take its buffers. Runs on workers."""
    from distmm.job import wave_graph  # noqa: F401

    if "no kernel" not in kernel_facts(choice):
        kernel_for(choice, LARGE, LARGE, LARGE, ())
    np.ones((64, 64)) @ np.ones((64, 64))

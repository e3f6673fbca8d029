"""The plan of a job: A and B are read step by step, C goes to the disk in waves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from distributed import Client

from distmm.all_workers import everywhere
from distmm.api.plan_request import storage_multiples, users_blocking
from distmm.clusters import cluster
from distmm.job.folder import Json
from distmm.job.spec import Spec
from distmm.planning.plan import Plan, make_plan
from distmm.worker.tasks import KernelChoice, kernel_facts

__all__ = ["plan_job"]

# Part of the free memory that is left for blocks on the wire and on their way to the disk, which the plan does not
# count: 0.13 measured on CPU workers with large blocks.
SPARE = 0.2

# Bytes/s at which a thread of a CPU worker brings blocks of A and B: it reads them from files that are in memory, and
# makes their sketches. 3.8 and 3 ms for 8 MB were measured.
CPU_LOAD = 1.2e9

# The same of a GPU worker, whose threads read pieces into pinned memory: 10 GB/s a block, two blocks at a time, of
# files that are in memory. Reckoned low: few disks are as fast, and A and B had better be read once.
GPU_LOAD = 1e10

# Bytes of host memory that a GPU's blocks take, if there is a choice: up to six blocks of C are on their way at a time,
# and one of 2 GB takes a thread a second to write.
GPU_HOST_MEMORY = 12 * 2**30


def plan_job(
    spec: Spec, client: Client, device: cluster.Device, blocks: tuple[int, int, int] | None, manifest: Json | None,
    text: str | None,
) -> Plan:  # fmt: skip
    """Plan a job: waves of C that go to the disk, A and B read step by step.

    Where k is split into layers, the bits of C depend on that, and a job that goes on keeps the whole plan.
    """
    a, b, problem = spec.a, spec.b, spec.problem
    asked: dict[str, Any] = {"kernel": spec.kernel, "precision": spec.precision}
    found = cluster.describe(client, problem.dtype, device, **asked)
    # What the libraries take is not free for blocks: they are loaded before the memory is looked at.
    everywhere(client, _load, KernelChoice(found.device, problem.dtype, spec.precision, spec.kernel))
    found = cluster.describe(client, problem.dtype, device, **asked)
    load = CPU_LOAD * found.threads if found.device == "cpu" else GPU_LOAD
    found = replace(found, memory=int(found.memory * (1 - SPARE)), load=load)
    if manifest is not None:
        blocks, text = tuple(manifest["blocks"]), manifest["plan"] if manifest["layers"] > 1 else text
    given = users_blocking(problem, a, b) if blocks is None else None
    edges = given.largest if given is not None else blocks

    def planned(host_memory: int | None) -> Plan:
        return make_plan(
            problem,
            replace(found, host_memory=host_memory),
            edges=edges,
            text=text,
            multiples=storage_multiples(a, b),
            precision=spec.precision,
            kernel=spec.kernel,
            operands=("resident" if a.resident else "streamed", "resident" if b.resident else "streamed"),
            result="out",
        )

    if found.device == "cuda" and edges is None and text is None:
        modest = planned(min(found.host_memory or GPU_HOST_MEMORY, GPU_HOST_MEMORY))
        if not modest.shortfall:
            return modest
    return planned(found.host_memory)


def _load(choice: KernelChoice) -> None:
    """Import what tasks of a job need, and have BLAS take its buffers. Runs on workers."""
    from distmm.job import wave_graph  # noqa: F401

    kernel_facts(choice)
    np.ones((64, 64)) @ np.ones((64, 64))

"""A cluster as plans see it: workers, memory, rates and links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["LOOKAHEAD", "SCHEDULER_SECONDS", "ClusterSpec", "Residence", "shortest_task"]

# Steps whose blocks of A and B may be in memory at once: while one computes, the blocks of the next one travel.
LOOKAHEAD = 2

# CPU time of the Dask scheduler for one task: 0.30 to 0.40 ms measured with 2 to 64 workers.
SCHEDULER_SECONDS = 0.35e-3

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
        Bytes/s at which a worker brings blocks of A and B that are in no worker's memory. At the same time a GPU sends
        finished blocks of C as fast: 52 GB/s each way were measured.
    host_memory : int, optional
        Bytes of host memory that a GPU worker may take; not limited where it is not known.
    threads : int
        Tasks that a worker runs at a time.
    prepared : float
        Bytes of a block in the kernel's own format, kept beside the block, for each byte of the block.
    workspace : int
        Bytes that the kernel takes for each task at work, beside operands and results, at most.
    granule : int
        Cuts of k at its multiples leave the bits of the kernel's results as they are.
    sums : float
        Bytes/s at which a kernel reads a block of sums of C, before it adds a product to them, and writes it after.
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
    workspace: int = 0
    granule: int = 32
    sums: float = math.inf


def shortest_task(workers: int) -> float:
    """Shortest task, in seconds, that leaves the scheduler 70 % idle: ``workers * 0.35 ms / 0.3``."""
    return workers * SCHEDULER_SECONDS / 0.3

"""A cluster in figures: workers, memory, rates and links; and where matrices are on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# CPU time of the Dask scheduler for one task: 0.30 to 0.40 ms measured with 2 to 64 workers.
SCHEDULER_SECONDS = 0.35e-3

# Where an operand is. "resident": in the workers' memory before and after the product. "loaded": loaded step by step,
# and freed after its step; a wave that needs it again loads it again, unless all of C stays in memory. "made": as
# "loaded", but computed from blocks in the workers' memory; plans count no time for that. "kept": loaded step by step,
# and in memory until the last wave has read it. "whole": made by tasks that others need too, and in memory from when
# they are made until their last use.
Residence = Literal["resident", "loaded", "made", "kept", "whole"]

# Operands that workers have in their memory, or make from what they have.
NEAR = ("resident", "made")

# Where finished blocks of C stay. "workers": where they were made. "host": in host memory beside the GPU. "out":
# elsewhere, in a file or in the client's memory. "reduced": nowhere, the task that finishes a block reduces it.
Result = Literal["workers", "host", "out", "reduced"]


@dataclass(frozen=True)
class ClusterSpec:
    """What a plan needs to know of a cluster.

    Parameters
    ----------
    workers : int
        Worker processes; on GPU clusters one for each GPU.
    memory : int
        Bytes that blocks may take on each worker (GPU memory on GPU clusters).
    device : {"cpu", "cuda"}
        Where the products run.
    rate : float
        FLOP/s of one worker's kernel on blocks of the product's type.
    link : float
        Bytes/s that a worker receives from other workers, and sends to them.
    load : float
        Bytes/s at which a worker loads blocks of A and B that are in no worker's memory. At the same time a
        GPU copies finished blocks of C to the host at this rate: 52 GB/s each way were measured.
    host_memory : int, optional
        Bytes of host memory that a GPU worker may take; not limited where it is not known.
    threads : int
        Tasks that a worker runs at a time.
    prepared : float
        Bytes of a block in the kernel's own format, kept beside the block, for each byte of the block.
    copied : float
        Bytes of a copy of a block, for each byte of the block, that exists while the kernel's own format is made.
    workspace : int
        Most bytes that the kernel takes for each running task, in addition to operands and results.
    one_launch : bool
        Whether the kernel multiplies all panels of a task in one launch, which stores C in its own type. Otherwise a
        task holds the sums of its panels beside its block of C.
    triangles : bool
        Whether the kernel computes one half only of the blocks on the diagonal of a symmetric product.
    granule : int
        If k is cut at multiples of it, the kernel's results keep their bits.
    kernel : str, optional
        The kernel that all workers use, unless the user has named one.
    promises_bits : bool
        Whether the kernel has a granule. Without one, any cut of k may change the bits.
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
    copied: float = 0.0
    workspace: int = 0
    one_launch: bool = False
    triangles: bool = False
    granule: int = 32
    kernel: str | None = None
    promises_bits: bool = True

    def missing(self, memory: int, host_memory: int) -> int:
        """Bytes that are missing on each worker, of its own memory and its host's, if it needs so many."""
        host = 0 if self.host_memory is None else max(0, host_memory - self.host_memory)
        return max(0, memory - self.memory) + host

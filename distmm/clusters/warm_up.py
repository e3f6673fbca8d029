"""Preparation of a cluster for its first product."""

from __future__ import annotations

import numpy as np
from distributed import Client, wait

from distmm.all_workers import workers_of
from distmm.clusters import view
from distmm.clusters.cluster import describe
from distmm.worker.tasks.kernel_choice import KernelChoice
from distmm.worker.tasks.warm_up import small_block, touch, warm

# Most workers to which `warm_up` connects each worker: all workers of a host, or a row and a column of 64 GPUs.
MOST_PEERS = 16


def warm_up(client: Client) -> None:
    """Prepare a cluster for its first product: install plugins; on GPUs also load kernels and open connections.

    The first transfer between two workers takes 0.5 s or more (for imports, a question whether they reach each other's
    memory, and the map of the other worker's pool). Later ones take milliseconds. Pairs of workers exchange a small
    block in ring order: worker r with r + 1, then with r + 2. So all workers transfer at the same time.
    """
    view.ask(client)
    threads = {address: info["nthreads"] for address, info in workers_of(client).items()}
    workers = list(threads)
    described = describe(client, np.dtype("f4"), flops=1)  # it does not wait for kernels that are still being built
    if described.device != "cuda":
        return
    choice = KernelChoice("cuda", np.dtype("f4"), planned=described.kernel)
    loads = [
        client.submit(warm, choice, workers=[address], pure=False)
        for address, count in threads.items()
        for _ in range(count)  # CUDA libraries have a context for each thread
    ]
    wait(loads)
    for shift in range(1, min(len(workers), MOST_PEERS + 1)):
        pairs = list(zip(workers, workers[shift:] + workers[:shift], strict=True))
        blocks = [client.submit(small_block, workers=[source], pure=False) for source, _ in pairs]
        received = [
            client.submit(touch, block, workers=[target], pure=False)
            for block, (_, target) in zip(blocks, pairs, strict=True)
        ]
        wait(received)

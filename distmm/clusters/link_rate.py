"""Bandwidth between workers.

Plans assume the best link there is (`distmm.clusters.cluster.LINKS`): NVLink between GPUs, loopback between processes
of one host. Many clusters have a slower network.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Literal

import numpy as np
from distributed import Client, Worker, wait
from distributed.worker import get_data_from_worker

from distmm.clusters.measured import measured_once
from distmm.worker.tasks import to_device
from distmm.worker.tasks.epilogue import Block

__all__ = ["link_rate"]

# Bytes of the block that is fetched. It takes 15 ms by loopback between processes, and by a network of 10 Gbit/s; with
# GPUs 2.5 ms by NVLink, beside 2 ms that any fetch takes.
BLOCK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 27}

# Fetches of a block: the first one opens the connection, and the fastest of the others counts.
FETCHES = 3

# Time after which a worker does not begin another fetch: enough for a network of 1 Gbit/s.
ENOUGH_SECONDS = 0.2

# Time after which the measurement is given up, for workers that are busy or lost; connections of GPUs take up to 2.5 s.
PATIENCE_SECONDS = 5.0


def link_rate(client: Client, device: Literal["cpu", "cuda"]) -> float | None:
    """Return bytes/s of the slowest kind of link between workers: within one host, and between two hosts.

    Asked once for each set of workers; None where they cannot tell, also later, and for a single worker.
    """
    hosts = {address: info["host"] for address, info in client.scheduler_info(n_workers=-1)["workers"].items()}
    pairs = list(_pairs(hosts))
    if not pairs:
        return None
    slowest = partial(_slowest, client, device, pairs)
    return measured_once(client, "the bandwidth between workers", (frozenset(hosts), device), slowest)


def _slowest(client: Client, device: Literal["cpu", "cuda"], pairs: list[tuple[str, str]]) -> float:
    """Measure the slowest of the links between `pairs` of workers."""
    return BLOCK_BYTES[device] / max(_fetch_seconds(client, device, *pair) for pair in pairs)


def _pairs(hosts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Two workers of one host, and two of different hosts, as far as there are such."""
    workers: dict[str, list[str]] = {}
    for address in sorted(hosts):
        workers.setdefault(hosts[address], []).append(address)
    yield from [(first, second) for first, second, *_ in (w for w in workers.values() if len(w) > 1)][:1]
    yield from itertools.pairwise([first for first, *_ in workers.values()][:2])


def _fetch_seconds(client: Client, device: Literal["cpu", "cuda"], source: str, target: str) -> float:
    """Seconds in which worker `target` fetches a block from worker `source`."""
    block = client.submit(_block, BLOCK_BYTES[device], device, workers=[source], pure=False)
    with client.as_current():  # `wait` takes no client
        wait(block, timeout=PATIENCE_SECONDS)
    seconds = client.run(_fetch, block.key, source, workers=[target])[target]
    assert isinstance(seconds, float)
    return seconds


def _block(nbytes: int, device: Literal["cpu", "cuda"]) -> Block:
    """Return a block that no compression makes smaller. Runs on workers."""
    block = np.random.default_rng(0).random(nbytes // 8)
    return to_device(block) if device == "cuda" else block


async def _fetch(key: str, source: str, dask_worker: Worker) -> float:
    """Return the seconds of the fastest fetch of a block from another worker. Runs on workers."""

    async def once() -> float:
        begun = time.perf_counter()
        answer = await get_data_from_worker(dask_worker.rpc, [key], source, who=dask_worker.address)
        seconds = time.perf_counter() - begun
        if key not in answer.get("data", {}):  # the peer is busy, or has lost the block
            raise OSError(f"{source} does not send its block: {answer['status']}")
        return seconds

    async def several() -> float:
        best, begun = math.inf, time.perf_counter()
        for _ in range(FETCHES):
            best = min(best, await once())
            if time.perf_counter() - begun > ENOUGH_SECONDS:
                break
        return best

    return await asyncio.wait_for(several(), PATIENCE_SECONDS)

"""Rates that are measured once for each set of workers: links between them, and copies from host memory to GPUs.

Plans use a measured rate only if it is lower than the usual one. A link that is faster while idle will not be as fast
while products run. Without a measurement, plans assume the fastest links (`distmm.clusters.cluster.LINKS`): NVLink
between GPUs, loopback between processes of one host; and PCIe 5 for each GPU (`LOADS`). Many clusters have a slower
network, many hosts an older PCIe, or GPUs that share a switch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import numpy as np

from distmm.all_workers import everywhere, in_thread
from distmm.clusters.view import hosts_of
from distmm.worker.tasks.epilogue import Block
from distmm.worker.tasks.loads import to_device
from distmm.worker.tasks.probe import copy_rate

if TYPE_CHECKING:
    from distributed import Client, Worker

logger = logging.getLogger(__name__)

# Bytes of the block that is fetched. The fetch takes 15 ms over loopback or a network of 10 Gbit/s, and between GPUs
# 2.5 ms over NVLink. The overhead of a fetch is 2 ms.
BLOCK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 27}

# Number of fetches. The first one opens the connection. The fastest one counts.
FETCHES = 3

# Seconds after which a worker starts no further fetch: enough for a network of 1 Gbit/s.
ENOUGH_SECONDS = 0.2

# Seconds after which a measurement fails, because workers are busy or lost. Connections of GPUs take up to 2.5 s. A
# worker copies for 0.15 s, but the first use of its GPU may take seconds.
PATIENCE_SECONDS, COPY_PATIENCE_SECONDS = 5.0, 20.0

_rates: WeakKeyDictionary[Client, dict[Hashable, float | None]] = WeakKeyDictionary()
_without_client: dict[Hashable, float | None] = {}


def measured_once(client: Client | None, name: str, of: Hashable, measure: Callable[[], float]) -> float | None:
    """Return a measured rate; measure it at the first call for these workers.

    Parameters
    ----------
    client : distributed.Client or None
        Client of the cluster; None for this process.
    name : str
        Name of the rate for the warning.
    of : hashable
        The workers, and all else on which the rate depends.
    measure : callable
        Measures the rate.

    Returns
    -------
    float or None
        The rate, rounded down to two digits, so that plans for nearly the same rate are reused. None if the measurement
        failed, now or at an earlier call.
    """
    known = _without_client if client is None else _rates.setdefault(client, {})
    if (name, of) not in known:
        known[name, of] = None  # stays after an interrupt
        try:
            rate = measure()
            step = 10.0 ** (math.floor(math.log10(rate)) - 1)
            known[name, of] = math.floor(rate / step) * step
        except Exception as error:  # any error: the product can run without this rate
            logger.warning("%s could not be measured, so plans assume the usual value: %r", name, error)
    return known[name, of]


def link_rate(client: Client, device: Literal["cpu", "cuda"]) -> float | None:
    """Return the bandwidth of the slower kind of link between workers: within a host, or between two hosts.

    Parameters
    ----------
    client : distributed.Client
    device : {"cpu", "cuda"}
        Memory of the block that workers send.

    Returns
    -------
    float or None
        Bytes/s, measured once for each set of workers. None for a single worker, and after a failed measurement.
    """
    hosts = hosts_of(client)
    pairs = list(_pairs(hosts))
    if not pairs:
        return None
    slowest = partial(_slowest, client, device, pairs)
    return measured_once(client, "the bandwidth between workers", (frozenset(hosts), device), slowest)


def _slowest(client: Client, device: Literal["cpu", "cuda"], pairs: list[tuple[str, str]]) -> float:
    """Return the bytes/s of the slowest link between `pairs` of workers."""
    return BLOCK_BYTES[device] / max(_fetch_seconds(client, device, *pair) for pair in pairs)


def _pairs(hosts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield two workers of one host and two workers of different hosts, if they exist; `hosts` is by address."""
    workers: dict[str, list[str]] = {}
    for address in sorted(hosts):
        workers.setdefault(hosts[address], []).append(address)
    yield from [(first, second) for first, second, *_ in (w for w in workers.values() if len(w) > 1)][:1]
    yield from itertools.pairwise([first for first, *_ in workers.values()][:2])


def _fetch_seconds(client: Client, device: Literal["cpu", "cuda"], source: str, target: str) -> float:
    """Return the seconds in which worker `target` fetches a block from worker `source`."""
    from distributed import wait

    from distmm.clusters.waiting import seceded

    block = client.submit(_block, BLOCK_BYTES[device], device, workers=[source], pure=False)
    with client.as_current(), seceded():  # `wait` takes no client
        wait(block, timeout=PATIENCE_SECONDS)
    # A stopped process does not even end its own measurement.
    return client.run(_fetch, block.key, source, workers=[target], callback_timeout=2 * PATIENCE_SECONDS)[target]


def _block(nbytes: int, device: Literal["cpu", "cuda"]) -> Block:
    """Return a random block, which compression cannot shrink. Runs on workers."""
    block = np.random.default_rng(0).random((1 << 10, nbytes >> 13))
    return to_device(block) if device == "cuda" else block


async def _fetch(key: str, source: str, dask_worker: Worker) -> float:
    """Return the seconds of the fastest fetch of a block from another worker. Runs on workers."""
    from distributed.worker import get_data_from_worker

    best, started = math.inf, time.perf_counter()
    async with asyncio.timeout(PATIENCE_SECONDS):
        for _ in range(FETCHES):
            begun = time.perf_counter()
            answer = await get_data_from_worker(dask_worker.rpc, [key], source, who=dask_worker.address)
            best = min(best, time.perf_counter() - begun)
            if key not in answer.get("data", {}):  # the other worker is busy, or has lost the block
                raise OSError(f"{source} does not send its block: {answer['status']}")
            if time.perf_counter() - started > ENOUGH_SECONDS:
                break
    return best


def load_rate(client: Client) -> float | None:
    """Return the rate of the slowest GPU while all GPUs of the cluster copy from pinned memory.

    Parameters
    ----------
    client : distributed.Client
        Client of a cluster of GPU workers.

    Returns
    -------
    float or None
        Bytes/s, measured once for each set of workers. None after a failed measurement.
    """
    rates = partial(everywhere, client, in_thread, copy_rate, seconds=COPY_PATIENCE_SECONDS)
    name, workers = "the rate of copies from host memory to GPUs", frozenset(hosts_of(client))
    return measured_once(client, name, workers, lambda: min(rates().values()))

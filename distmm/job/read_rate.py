"""How fast workers read A and B from their files: measured once for a set of workers and matrices, and kept.

Plans assume files that are in the memory of the hosts (`distmm.job.planning.LOADS`). Disks and networks are slower, and
some programs unpack chunks slowly. Callers take a lower rate only: files that are in memory while the plan is made need
not be when they are read.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary

from distributed import Client, Worker

from distmm.clusters.link_rate import two_digits
from distmm.storage.matrix import Matrix
from distmm.worker.tasks import load

__all__ = ["read_rate"]

logger = logging.getLogger(__name__)

# Bytes that are read in one go, at least; a chunk if it is larger. A disk with 100 MB/s takes 40 ms.
PIECE_BYTES = 1 << 22

# Time after which a thread begins no other piece, and pieces that it reads at most.
ENOUGH_SECONDS, MOST_PIECES = 0.2, 16

# Workers that read at the same time, at most: enough to see what they share.
MOST_WORKERS = 16

_rates: WeakKeyDictionary[Client, dict[tuple[frozenset[str], str, str], float | None]] = WeakKeyDictionary()


def read_rate(client: Client, matrix: Matrix, device: Literal["cpu", "cuda"]) -> float | None:
    """Return the bytes/s at which each worker reads blocks of a matrix while the others read too.

    Parameters
    ----------
    client : distributed.Client
    matrix : Matrix
    device : {"cpu", "cuda"}
        Where the blocks go.

    Returns
    -------
    float or None
        None where the workers cannot tell, also later.
    """
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
    known = _rates.setdefault(client, {})
    key = frozenset(workers), matrix.path, device
    if key not in known:
        known[key] = None  # also if this is interrupted
        known[key] = _measured(client, workers[:MOST_WORKERS], matrix, device)
    return known[key]


def _measured(client: Client, workers: list[str], matrix: Matrix, device: Literal["cpu", "cuda"]) -> float | None:
    """Let workers read; None if that fails: it says so where the matrix is read for the product."""
    ranks = {address: rank for rank, address in enumerate(workers)}
    try:
        rates = client.run(_read, ranks, matrix, device, workers=workers)
    except Exception as error:  # whatever it is: the product has not begun, and can do without the figure
        logger.warning("%s: the rate of reading could not be measured, plans assume a fast one: %r", matrix.path, error)
        return None
    return two_digits(min(rates.values()))


def _read(ranks: dict[str, int], matrix: Matrix, device: Literal["cpu", "cuda"], dask_worker: Worker) -> float:
    """Return bytes/s of all threads of this worker. Each of them reads other parts of the matrix. Runs on workers."""
    threads = dask_worker.state.nthreads
    first = ranks[dask_worker.address] * threads
    with ThreadPoolExecutor(threads) as pool:
        read = pool.map(partial(_read_in_turn, matrix, device, len(ranks) * threads), range(first, first + threads))
        return sum(size / seconds for size, seconds in read)


def _read_in_turn(matrix: Matrix, device: Literal["cpu", "cuda"], readers: int, reader: int) -> tuple[int, float]:
    """Read pieces, as far apart as there are readers; return their bytes, and seconds."""
    size, begun = 0, time.perf_counter()
    for index in pieces(matrix, readers, reader):
        size += load(matrix, index, device).nbytes
        if time.perf_counter() - begun > ENOUGH_SECONDS:
            break
    return size, max(time.perf_counter() - begun, 1e-9)


def pieces(matrix: Matrix, readers: int, reader: int) -> Iterator[tuple[slice, slice]]:
    """Yield the parts of a matrix that one of several readers reads: whole chunks, and none that another one reads.

    Where there are fewer parts than readers, some readers read the same ones.
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

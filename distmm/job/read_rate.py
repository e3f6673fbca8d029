"""Measures how fast workers read A and B from their files.

Plans assume files in the page cache (`distmm.job.planning.LOADS`). Disks and networks are slower, and so is the
decompression of some chunks. A file that is in the page cache during the measurement may not be there during the job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

from distributed import Client, Worker

from distmm.all_workers import workers_of
from distmm.clusters.measured import measured_once
from distmm.storage.matrix import Matrix
from distmm.worker.tasks import load

# Bytes of a piece, or a chunk if that is larger. A disk with 100 MB/s reads a piece in 40 ms.
PIECE_BYTES = 1 << 22

# A thread begins no further piece after this time, or after this number of pieces.
ENOUGH_SECONDS, MOST_PIECES = 0.2, 16

# Largest number of workers that read concurrently. It is enough to measure the rate of a shared disk.
MOST_WORKERS = 16


def read_rate(client: Client | None, matrix: Matrix, device: Literal["cpu", "cuda"], threads: int = 1) -> float | None:
    """Return the rate in bytes/s at which each worker reads blocks of a matrix to `device` while all workers read.

    It is measured once for each set of workers. None if the measurement fails; it is then not repeated. Without a
    client, this process reads as one worker with `threads`.
    """
    name = f"the rate of reading {matrix.path}"
    if client is None:
        return measured_once(None, name, (threads, device), partial(_of_threads, matrix, device, threads, 1, 0))
    workers = sorted(workers_of(client))
    slowest = partial(_slowest, client, workers[:MOST_WORKERS], matrix, device)
    return measured_once(client, name, (frozenset(workers), device), slowest)


def _slowest(client: Client, workers: list[str], matrix: Matrix, device: Literal["cpu", "cuda"]) -> float:
    """Have workers read concurrently, and return the lowest of their rates."""
    ranks = {address: rank for rank, address in enumerate(workers)}
    rates: dict[str, float] = client.run(_read, ranks, matrix, device, workers=workers)
    return min(rates.values())


def _read(ranks: dict[str, int], matrix: Matrix, device: Literal["cpu", "cuda"], dask_worker: Worker) -> float:
    """Return the bytes/s of all threads of this worker, which read different parts. Runs on workers."""
    return _of_threads(matrix, device, dask_worker.state.nthreads, len(ranks), ranks[dask_worker.address])


def _of_threads(matrix: Matrix, device: Literal["cpu", "cuda"], threads: int, workers: int, rank: int) -> float:
    """Return the bytes/s of all threads of one worker."""
    first = rank * threads
    with ThreadPoolExecutor(threads) as pool:
        read = pool.map(partial(_read_in_turn, matrix, device, workers * threads), range(first, first + threads))
        return sum(size / seconds for size, seconds in read)


def _read_in_turn(matrix: Matrix, device: Literal["cpu", "cuda"], readers: int, reader: int) -> tuple[int, float]:
    """Read the pieces of one reader, and return their bytes and the seconds."""
    size, begun = 0, time.perf_counter()
    for index in pieces(matrix, readers, reader):
        size += load(matrix, index, device).nbytes
        if time.perf_counter() - begun > ENOUGH_SECONDS:
            break
    return size, max(time.perf_counter() - begun, 1e-9)


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

"""Tall arrays that are persisted by rows, multiplied by distmm and by Dask in turns, on GPUs or CPU workers.

Each product is computed to the client's memory, so that no result counts before it is there: tasks of CuPy end when
their kernels are enqueued. The first turn of each is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import dask.array as da
from dask.distributed import Client, LocalCluster, wait

import distmm
from distmm.telemetry import client as telemetry


def main() -> None:
    """Print a table: median seconds of Dask and of distmm, and the bytes that distmm moved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=16, help="chunks of rows")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="CPU workers")
    parser.add_argument("--gpus", action="store_true", help="dask-cuda's cluster with its defaults, and --protocol")
    parser.add_argument("--protocol", choices=("tcp", "ucx"), default="tcp")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    with cluster_of(asked) as cluster, Client(cluster) as client:
        for name, by_dask, by_distmm in products(asked):
            seconds: dict[str, list[float]] = {"dask": [], "distmm": []}
            moved = 0
            for _ in range(asked.turns + 1):
                for who, make in (("dask", by_dask), ("distmm", by_distmm)):
                    before, started = telemetry.bytes_moved(client), time.perf_counter()
                    make().compute()
                    seconds[who].append(time.perf_counter() - started)
                    moved = telemetry.bytes_moved(client) - before
            dask, ours = (statistics.median(seconds[who][1:]) for who in ("dask", "distmm"))
            print(f"{name:9} Dask {dask:.3f} s, distmm {ours:.3f} s ({ours / dask:.2f}), moved {moved / 1e6:.1f} MB")  # noqa: T201


def cluster_of(asked: argparse.Namespace) -> Any:
    """Return a cluster as users start it."""
    if not asked.gpus:
        return LocalCluster(n_workers=asked.workers, threads_per_worker=1, dashboard_address=":0")
    from dask_cuda import LocalCUDACluster

    pool = {"rmm_pool_size": 0.6} if asked.protocol == "ucx" else {}
    return LocalCUDACluster(dashboard_address=":0", protocol=asked.protocol, **pool)


def products(asked: argparse.Namespace) -> list[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Return the products of a persisted array: name, by Dask, by distmm."""
    random = da.random.RandomState(0)
    if asked.gpus:
        import cupy

        random = da.random.RandomState(0, RandomState=cupy.random.RandomState)
    shape = asked.rows, asked.width
    X = random.standard_normal(shape, chunks=(-(-asked.rows // asked.chunks), asked.width)).astype("f4").persist()
    W = random.standard_normal((asked.width, asked.width // 8), chunks=-1).astype("f4").persist()
    wait([X, W])
    return [
        ("X.T @ X", lambda: X.T @ X, lambda: distmm.matmul(X.T, X)),
        ("gram", lambda: X.T @ X, lambda: distmm.gram(X.T)),
        ("sum X @ W", lambda: (X @ W).sum(), lambda: distmm.matmul(X, W).sum()),
        ("cov", lambda: da.cov(X.T), lambda: distmm.cov(X.T)),
    ]


if __name__ == "__main__":
    main()

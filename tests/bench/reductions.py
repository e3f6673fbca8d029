"""The best k of each row of a product: distmm beside Dask, and beside the product alone, in turns.

    python tests/bench/reductions.py --rows 8192 --features 768

Dask has its threads, NumPy arrays in memory, and several sizes of chunks; the best one counts. distmm has a local
cluster, whose workers read the same arrays. Each answer is compared with NumPy's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import psutil

import distmm
from distmm import clusters

CHUNKS = (1024, 2048, 4096)


def cpu_seconds() -> float:
    """CPU time of this process and of all that it has started."""
    me = psutil.Process()
    return float(sum(t.user + t.system for t in (p.cpu_times() for p in (me, *me.children(recursive=True)))))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--best", type=int, default=15)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    rows, k = asked.rows, asked.best
    rng = np.random.default_rng(0)
    X = rng.standard_normal((rows, asked.features), dtype="f4")
    Y = np.ascontiguousarray(rng.standard_normal((rows, asked.features), dtype="f4").T)
    XT = np.ascontiguousarray(X.T)

    def dask_topk(B: np.ndarray, chunk: int) -> Callable[[], Any]:
        def run() -> Any:
            a, b = da.from_array(X, chunks=(chunk, -1)), da.from_array(B, chunks=(-1, chunk))
            return da.topk(da.matmul(a, b), k, axis=1).compute(scheduler="threads")

        return run

    with clusters.local("cpu", dashboard=None, quiet=True) as client:

        def topk(B: np.ndarray | None) -> Callable[[], Any]:
            return lambda: distmm.topk(X, B, k, client=client).compute()[0]

        cases: dict[str, Callable[[], Any]] = {"NumPy, the product alone": lambda: X @ Y}
        cases |= {f"da.topk(da.matmul(X, Y)), chunks of {chunk}": dask_topk(Y, chunk) for chunk in CHUNKS}
        cases["distmm.topk(X, Y)"] = topk(Y)
        cases |= {f"da.topk(da.matmul(X, X.T)), chunks of {chunk}": dask_topk(XT, chunk) for chunk in CHUNKS}
        cases["distmm.topk(X, None)"] = topk(None)
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for turn in range(asked.turns + 1):  # the first one warms up
            for name, run in cases.items():
                cpu, start = cpu_seconds(), time.perf_counter()
                run()
                if turn:
                    figures[name].append((time.perf_counter() - start, cpu_seconds() - cpu))
        for B, C in ((Y, X @ Y), (None, X @ XT)):
            found = distmm.topk(X, B, k, client=client).compute()[1]
            truth = np.argpartition(C, rows - k, axis=1)[:, rows - k :]
            recall = np.mean([len(np.intersect1d(*each)) / k for each in zip(found, truth, strict=True)])
            print(f"recall of {'X, None' if B is None else 'X, Y'}: {recall:.6f}")  # noqa: T201
    for name, each in figures.items():
        seconds, cpu = (statistics.median(column) for column in zip(*each, strict=True))
        least = min(cpu for _, cpu in each)
        print(f"{name:48} {seconds:7.2f} s  {cpu:7.2f} CPU s, at least {least:.2f}")  # noqa: T201


if __name__ == "__main__":
    main()

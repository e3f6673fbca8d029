"""The best k of each row of a product on a GPU, beside the product alone and the kernels that reduce a block.

    python tests/bench/reductions_gpu.py --rows 1000000 --features 768

X and Y are NumPy arrays. Recall is measured on 20 rows, against products in float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import distmm
from distmm import clusters


def block_seconds(m: int, k: int, n: int, best: int) -> tuple[float, float]:
    """Seconds of a product of operands in GPU memory, and of finding the best of its rows: means of ten."""
    import cupy as cp

    from distmm.worker.tasks.reductions import Largest
    from distmm_kernels.config import Problem
    from distmm_kernels.device import current
    from distmm_kernels.select import select

    kernel = select(Problem(m=m, k=k, n=n, dtype=np.dtype("f4")), current(), "highest")
    rng = cp.random.default_rng(0)
    a = kernel.prepare_a(rng.standard_normal((m, k), dtype="f4"))
    b = kernel.prepare_b(rng.standard_normal((k, n), dtype="f4"))
    block = kernel.multiply(a, b, None)
    reduction = Largest(best, np.dtype("f4"))

    def mean(run: Callable[[], Any]) -> float:
        run()
        cp.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(10):
            run()
        cp.cuda.Device().synchronize()
        return (time.perf_counter() - start) / 10

    return mean(lambda: kernel.multiply(a, b, None)), mean(lambda: reduction.chunk(block, 0, None))


def main() -> None:
    """Measure, and print seconds and rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--best", type=int, default=15)
    parser.add_argument("--turns", type=int, default=2)
    asked = parser.parse_args()
    rows, features, k = asked.rows, asked.features, asked.best
    rng = np.random.default_rng(0)
    X, Y = (rng.standard_normal((rows, features), dtype="f4") for _ in range(2))
    with clusters.local("gpu", dashboard=None, quiet=True) as client:
        for name, B in (("X, Y", Y.T), ("X, None", None)):
            flop = 2 * rows**2 * features / (1 if B is not None else 2)  # each pair of rows of X once
            for turn in range(asked.turns):
                start = time.perf_counter()
                _, found = distmm.topk(X, B, k, client=client).compute()
                seconds = time.perf_counter() - start
                print(f"topk({name}), turn {turn}: {seconds:.2f} s, {flop / seconds / 1e12:.1f} TFLOP/s")  # noqa: T201
            sampled = rng.integers(rows, size=20)
            C = X[sampled].astype("f8") @ (X.T if B is None else B).astype("f8")
            truth = np.argpartition(C, rows - k, axis=1)[:, rows - k :]
            recall = np.mean([len(np.intersect1d(*each)) / k for each in zip(found[sampled], truth, strict=True)])
            print(f"recall: {recall:.4f}")  # noqa: T201
        block = distmm.plan(X, Y.T, client=client).blocking
    m, n = max(block.m), max(block.n)
    product, best = block_seconds(m, features, n, k)
    rate = 2 * m * n * features / product / 1e12
    print(f"a block of {m} x {n}: product {product * 1e3:.2f} ms, {rate:.1f} TFLOP/s; best {best * 1e3:.2f} ms")  # noqa: T201


if __name__ == "__main__":
    main()

"""``compute()`` of a product of NumPy arrays beside ``out=``, in turns: ``python tests/bench/compute.py``.

Both start without an array for C. Two more cases say what the ways differ in: ``out=`` into an array that is there, and
``dask.compute``, which is Dask's own way through one worker and the scheduler. `--pinned` takes the operands, and the
array that is there, from `distmm.empty`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import dask
import numpy as np
import typer
from experiment import matrices

import distmm
from distmm import clusters


def main(arguments: list[str] | None = None) -> None:
    """Measure, check each C, and print a row for each turn and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--size", type=int, default=32768, help="rows of A, columns of B")
    parser.add_argument("--depth", type=int, help="columns of A, rows of B; by default as --size")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--without-dask", action="store_true", help="leave out Dask's own way")
    asked = parser.parse_args(arguments)
    n, k = asked.size, asked.depth or asked.size

    with clusters.local(asked.device, workers=asked.workers, dashboard=None, quiet=True) as client:
        make = distmm.empty if asked.pinned else np.empty
        A, B, there = make((n, k), "f4"), make((k, n), "f4"), make((n, n), "f4")
        for seed, operand in enumerate((A, B)):
            matrices.fill(operand, seed)
        there[:] = 0
        cases: dict[str, Callable[[], np.ndarray]] = {
            "out=, new": lambda: distmm.matmul(A, B, out=np.empty((n, n), "f4"), client=client),
            "compute()": lambda: distmm.matmul(A, B, client=client).compute(),
            "out=, there": lambda: distmm.matmul(A, B, out=there, client=client),
        }
        if not asked.without_dask:
            cases["dask.compute"] = lambda: dask.compute(distmm.matmul(A, B, client=client))[0]
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(asked.turns + 1):  # the first one warms up
            for name, run in cases.items():
                start = time.perf_counter()
                C = run()
                took = time.perf_counter() - start
                if not distmm.verify(A, B, C).ok:
                    raise SystemExit(f"{name}: C is wrong")
                if turn:
                    seconds[name].append(took)
                    typer.echo(f"turn {turn}, {name}: {took:.3f} s")
                del C
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    typer.echo(f"{n} x {k} x {n}, medians: {', '.join(f'{name} {each:.3f} s' for name, each in medians.items())}")
    typer.echo(f"compute() at {medians['out=, new'] / medians['compute()']:.2f} of the rate of out= into a new array")


if __name__ == "__main__":
    main()

"""A randomised SVD of a tall matrix, by Dask alone and with ``distmm.accelerate()``, in turns in one process.

OPENBLAS_NUM_THREADS=1 leaves the difference that has nothing to do with threads of BLAS.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from dataclasses import dataclass

import dask
import dask.array as da
import numpy as np
import typer

import distmm


@dataclass(frozen=True)
class Turn:
    """One decomposition: seconds, CPU seconds, and the singular values."""

    seconds: float
    cpu: float
    values: np.ndarray


def decompose(matrix: da.Array, rank: int, iterations: int, by_distmm: bool) -> Turn:
    """Decompose a matrix from the call to the last block of U, S and V, on Dask's threaded scheduler."""
    began, before = time.perf_counter(), os.times()
    with distmm.accelerated() if by_distmm else contextlib.nullcontext():
        parts = da.linalg.svd_compressed(matrix, rank, n_power_iter=iterations, seed=1)
    _, values, _ = dask.compute(*parts, scheduler="threads")
    after = os.times()
    cpu = after.user + after.system - before.user - before.system
    return Turn(time.perf_counter() - began, cpu, values)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a row for each turn and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--blocks", type=int, nargs=2, default=(16, 4), metavar=("DOWN", "ACROSS"))
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=0, help="power iterations")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args(arguments)

    values = np.random.default_rng(0).standard_normal((asked.rows, asked.columns)).astype(asked.dtype)
    chunks = tuple(-(-n // blocks) for n, blocks in zip(values.shape, asked.blocks, strict=True))
    matrix = da.from_array(values, chunks=chunks, name="matrix")
    size = f"{asked.rows} x {asked.columns} {asked.dtype} in {'x'.join(map(str, matrix.numblocks))} blocks"
    typer.echo(f"{size}, rank {asked.rank}, {asked.iterations} iterations; seconds (CPU seconds)")
    turns: dict[bool, list[Turn]] = {False: [], True: []}
    for _ in range(asked.turns):
        for by_distmm in turns:
            turns[by_distmm].append(decompose(matrix, asked.rank, asked.iterations, by_distmm))
        theirs, ours = turns[False][-1], turns[True][-1]
        np.testing.assert_allclose(ours.values, theirs.values, rtol=1e-3 if asked.dtype == "float32" else 1e-8)
        typer.echo(f"Dask {theirs.seconds:.2f} ({theirs.cpu:.2f}), distmm {ours.seconds:.2f} ({ours.cpu:.2f})")
    seconds, cpu = (
        [statistics.median(getattr(turn, what) for turn in turns[by_distmm]) for by_distmm in (False, True)]
        for what in ("seconds", "cpu")
    )
    typer.echo(f"medians: {seconds[0]:.2f} to {seconds[1]:.2f} s, {seconds[0] / seconds[1]:.2f} times; ", nl=False)
    typer.echo(f"CPU {cpu[0]:.2f} to {cpu[1]:.2f} s, {cpu[0] / cpu[1]:.2f} times")


if __name__ == "__main__":
    main()

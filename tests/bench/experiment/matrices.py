"""Matrices of N(0, 1), in the workers' memory and in host memory; of complex numbers both parts are N(0, 1).

bfloat16 numbers are drawn from 2**16 quantiles of N(0, 1). That is five times as fast as drawing float32 numbers by the
ziggurat method, of which a core makes 57 million a second.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import NormalDist
from typing import Any

import dask.array as da
import numpy as np
import psutil
from distributed import Client, Future, Scheduler, futures_of, wait

from distmm.errors import InputError
from distmm.planning.owners import Grid
from distmm.scheduler.plugin import PlacementPlugin
from distmm.transfer import empty
from experiment.cases import element

__all__ = ["Arena", "draw", "fill", "finish", "home", "normal", "resident"]

# STRIP: numbers that a thread draws with one generator. PIECE: bfloat16 numbers that it draws at a time; they fit into
# its cache.
STRIP, PIECE = 1 << 24, 1 << 17

# Share of the host's free memory that matrices may take.
MOST = 0.9


def resident(
    client: Client, operand: str, n: int, edge: int, grid: Grid, dtype: np.dtype[Any], seed: int, gpu: bool
) -> da.Array:
    """Return a new A or B of CuPy or NumPy blocks: A is spread over the workers by rows, B by columns.

    `home` says where each block is.
    """
    ranks: list[str] = client.run_on_scheduler(_ranks)
    name = f"bench-{uuid.uuid4().hex}"
    chunks = da.core.normalize_chunks((edge, edge), (n, n), dtype=dtype)
    blocks: dict[tuple[str, int, int], Future] = {}
    for i, height in enumerate(chunks[0]):
        for j, width in enumerate(chunks[1]):
            at = ranks[home(operand, i, j, (len(chunks[0]), len(chunks[1])), grid)]
            blocks[name, i, j] = client.submit(
                normal, (height, width), dtype, [seed, i, j], gpu, key=(name, i, j), workers=[at], pure=False
            )
    meta: Any = np.empty((0, 0), dtype)
    if gpu:
        import cupy

        meta = cupy.empty((0, 0), dtype)
    array = da.Array(blocks, name, chunks, meta=meta)
    finish(array)
    return array


def home(operand: str, i: int, j: int, blocks: tuple[int, int], grid: Grid) -> int:
    """Return the rank that holds block (i, j) of A or B, which has ``blocks`` rows and columns of blocks.

    A row of the grid multiplies every ``grid.rows``-th block row of A. Its ranks hold equal shares of these rows, one
    share after the other. Columns of the grid hold B by block columns in the same way. If a rank has whole rows of A or
    columns of B, it begins each step of a product with blocks that it holds.
    """
    if operand == "A":
        return grid.owner(i, _share(i, j, blocks, grid.rows, grid.columns))
    return grid.owner(_share(j, i, blocks[::-1], grid.columns, grid.rows), j)


def _share(line: int, step: int, blocks: tuple[int, int], apart: int, ranks: int) -> int:
    """Return which of ``ranks`` equal shares has a block, of the lines that are ``apart`` lines from each other."""
    lines, steps = len(range(line % apart, blocks[0], apart)), blocks[1]
    return (line // apart * steps + step) * ranks // (lines * steps)


def _ranks(dask_scheduler: Scheduler) -> list[str]:
    """Addresses of the workers in the order of their ranks. Runs on the scheduler."""
    return list(dask_scheduler.plugins[PlacementPlugin.name].ranks)


def normal(shape: tuple[int, int], dtype: np.dtype[Any], seed: list[int], gpu: bool) -> Any:
    """Draw a block, in GPU or host memory. Runs on workers."""
    if not gpu:
        block = np.empty(shape, dtype)
        draw(block, seed)
        return block
    import cupy

    one = int(np.random.SeedSequence(seed).generate_state(1)[0])
    drawn = dtype if dtype == np.float64 else np.dtype("f4")
    columns = shape[1] * (2 if dtype.kind == "c" else 1)
    numbers = cupy.random.default_rng(one).standard_normal((shape[0], columns), dtype=drawn)
    return numbers.view(dtype) if dtype.kind == "c" else numbers.astype(dtype, copy=False)


def finish(array: da.Array) -> None:
    """Wait until all blocks of a persisted array are computed. If one failed, raise its error."""
    blocks = futures_of(array)
    wait(blocks)
    for block in blocks:
        if block.status != "finished":
            block.result()


class Arena:
    """Host memory for square matrices, allocated once, because allocating and pinning 50 GB takes half a minute.

    Parameters
    ----------
    nbytes : int
        Bytes of the largest A, B and C together.
    client : distributed.Client, optional
        The client whose GPU workers pin the memory.

    Raises
    ------
    InputError
        If the host has too little free memory.
    """

    def __init__(self, nbytes: int, client: Client | None = None) -> None:
        free = psutil.virtual_memory().available
        if nbytes > MOST * free:
            raise InputError(
                f"the matrices take {nbytes / 1e9:.3g} GB of host memory, {free / 1e9:.3g} GB is free there: use a "
                f"smaller size, or leave the host's memory out"
            )
        self.memory = empty(nbytes, "u1", client=client)

    def matrices(self, n: int, dtype: np.dtype[Any], count: int = 3) -> list[np.ndarray]:
        """Return the matrices A, B and C. They are contiguous in the memory, in this order."""
        flat = self.memory[: count * n * n * dtype.itemsize].view(dtype)
        return [flat[i * n * n : (i + 1) * n * n].reshape(n, n) for i in range(count)]


def fill(matrix: np.ndarray, seed: int) -> None:
    """Write random numbers of any of `TYPES` to a matrix in C order, with all cores."""
    height = max(1, STRIP // matrix.shape[1])
    strips = range(0, matrix.shape[0], height)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda first: draw(matrix[first : first + height], [seed, first]), strips))


def draw(block: np.ndarray, seed: Sequence[int]) -> None:
    """Write random numbers of any of `TYPES` to contiguous rows.

    It releases the GIL. A cast to bfloat16 would hold the GIL, so it does not cast.
    """
    random = np.random.Generator(np.random.SFC64(seed))
    if block.dtype == np.complex64:
        block = block.view(np.float32)
    if block.dtype in (np.float32, np.float64):
        random.standard_normal(out=block, dtype=block.dtype)
        return
    values, table = block.view(np.uint16).reshape(-1), _quantiles()
    for first in range(0, values.size, PIECE):
        piece = values[first : first + PIECE]
        drawn = random.integers(0, 2**64, -(-piece.size // 4), dtype=np.uint64).view(np.uint16)[: piece.size]
        np.take(table, drawn, out=piece, mode="wrap")  # with mode "raise", NumPy would write to a copy of `out` first


@functools.cache
def _quantiles() -> np.ndarray:
    """Quantiles (i + 1/2) / 2**16 of N(0, 1), as the bits of bfloat16 numbers; the last ones are -4.17 and 4.17."""
    exact = [NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**16)]
    return np.array(exact).astype(element("bfloat16")).view(np.uint16)

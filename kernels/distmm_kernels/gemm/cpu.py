"""The CPU kernel: BLAS for floating point, and a tiled kernel of our own for integers, which no BLAS has.

``numpy.matmul`` multiplies integers in a plain triple loop. Here one task owns one tile of C, packs the tile of A and
the panel of B that it needs into contiguous buffers, and lets the compiler vectorise over the columns.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from distmm_kernels.device import cpu
from distmm_kernels.kernel import Array, Kernel

__all__ = ["CpuKernel"]

# A panel of B (TILE_K x TILE_N, 256 KiB of int64) and a tile of A stay in the second-level cache; four rows of
# B and two of C (TILE_N x 8 B each) in the first.
TILE_M, TILE_N, TILE_K = 64, 256, 128


class CpuKernel(Kernel):
    """BLAS for floats and complex numbers (its own order of additions), tiles with wrap-around for integers."""

    name = "cpu"
    device_kind = "cpu"

    @property
    def _module(self) -> Any:
        return np

    def _to_device(self, block: Array) -> Array:
        return block.get() if hasattr(block, "get") else np.asarray(block)

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _complete(self) -> None:
        """Nothing is asynchronous here."""

    def _format(self, block: Array) -> Array:
        block = block.astype(self.dtype, copy=False)
        if self.dtype.kind == "i":  # packed tile by tile, whatever the strides
            return block if block.flags.aligned else block.copy()
        return block if _blas_can_read(block) else np.ascontiguousarray(block)

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        if self.dtype.kind == "i":
            d[...] = 0 if c is None else c
            _accumulate_integers(a, b, d)
        else:
            np.matmul(a, b, out=d)
            if c is not None:
                np.add(c, d, out=d)


def _blas_can_read(block: Array) -> bool:
    """BLAS wants one unit stride and a positive leading dimension; for anything else NumPy uses a plain loop."""
    (rows, columns), (row, column) = block.shape[-2:], block.strides[-2:]
    item = block.itemsize
    in_c_order = column == item and row >= columns * item
    in_f_order = row == item and column >= rows * item
    return bool(block.flags.aligned and (in_c_order or in_f_order) and row % item == 0 and column % item == 0)


def _accumulate_integers(a: Array, b: Array, d: Array) -> None:
    """Add ``a @ b`` to ``d`` modulo 2^bits, the tiles of ``d`` shared out over the pool."""
    add_tile = _compiled(d.dtype)
    batch, (m, n) = d.shape[:-2], d.shape[-2:]
    a = np.broadcast_to(a, (*batch, *a.shape[-2:]))
    b = np.broadcast_to(b, (*batch, *b.shape[-2:]))
    tiles = [
        (a[index][i : i + TILE_M], b[index][:, j : j + TILE_N], d[index][i : i + TILE_M, j : j + TILE_N])
        for index in np.ndindex(batch)
        for i in range(0, m, TILE_M)
        for j in range(0, n, TILE_N)
    ]
    pool = _pool()
    if pool is None or len(tiles) == 1:
        for tile in tiles:
            add_tile(*tile)
    else:
        for _ in pool.map(lambda tile: add_tile(*tile), tiles):
            pass


@functools.cache
def _pool() -> ThreadPoolExecutor | None:
    """One pool for the process: however many Dask threads call at once, no more than its threads compute.

    OMP_NUM_THREADS bounds it as it bounds BLAS. Dask's nanny sets that to 1, since the workers are the parallelism
    there; then each caller computes in its own thread. Numba's own threading layers are not used: the default one
    without TBB or OpenMP, workqueue, aborts the process when two threads call it at once.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdigit() and int(wanted) > 0 else cpu().multiprocessors
    return ThreadPoolExecutor(threads, "distmm-cpu") if threads > 1 else None


# A forked child has the pool's lock but not its threads: let it make its own.
os.register_at_fork(after_in_child=_pool.cache_clear)


@functools.cache
def _compiled(dtype: np.dtype[Any]) -> Callable[[Array, Array, Array], None]:
    """Compile the kernel of one tile for ``dtype``, once a process (about a second)."""
    from numba import from_dtype, njit, types

    number = from_dtype(dtype)
    operand = types.Array(number, 2, "A", readonly=True)  # any strides; read-only arrays too
    result = types.Array(number, 2, "A")
    # nogil: the tiles run side by side in Python threads
    compile_for = njit([types.void(operand, operand, result)], nogil=True)
    compiled: Callable[[Array, Array, Array], None] = compile_for(_add_tile)
    return compiled


def _add_tile(a, b, d):
    """``d += a @ b`` for one tile of C: a (m, k), b (k, n), m <= TILE_M, n <= TILE_N; in Numba's language."""
    m, n, depth = d.shape[0], d.shape[1], a.shape[1]
    rows = m + m % 2  # two rows of C at a time use each row of B twice
    total = np.zeros((rows, n), d.dtype)
    packed_a = np.zeros((rows, TILE_K), d.dtype)  # its zero frame makes the last row and the last steps of k harmless
    packed_b = np.zeros((TILE_K, n), d.dtype)
    for k0 in range(0, depth, TILE_K):
        steps = min(TILE_K, depth - k0)
        padded = (steps + 3) // 4 * 4
        for i in range(m):
            for k in range(steps):
                packed_a[i, k] = a[i, k0 + k]
            packed_a[i, steps:padded] = 0
        for k in range(steps):
            for j in range(n):
                packed_b[k, j] = b[k0 + k, j]
        for i in range(0, rows, 2):
            for k in range(0, padded, 4):  # four steps of k for each load and store of C
                a00, a01, a02, a03 = packed_a[i, k], packed_a[i, k + 1], packed_a[i, k + 2], packed_a[i, k + 3]
                a10, a11 = packed_a[i + 1, k], packed_a[i + 1, k + 1]
                a12, a13 = packed_a[i + 1, k + 2], packed_a[i + 1, k + 3]
                b0, b1, b2, b3 = packed_b[k], packed_b[k + 1], packed_b[k + 2], packed_b[k + 3]
                c0, c1 = total[i], total[i + 1]
                for j in range(n):
                    c0[j] += a00 * b0[j] + a01 * b1[j] + a02 * b2[j] + a03 * b3[j]
                    c1[j] += a10 * b0[j] + a11 * b1[j] + a12 * b2[j] + a13 * b3[j]
    for i in range(m):
        for j in range(n):
            d[i, j] += total[i, j]

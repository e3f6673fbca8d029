"""Integer products on the CPU, modulo 2^bits, by tiles: no BLAS has them, and ``numpy.matmul`` uses a plain loop.

One task owns one tile of C, packs the tiles of A and B that it needs into contiguous buffers of 32-bit numbers, and
lets the compiler vectorise over the columns. A 64-bit number is split into signed halves, x = low + 2^32 high, so that

    a b = a_low b_low + 2^32 (a_high b_low + a_low b_high)    (mod 2^64)

whose first product is one instruction of any vector unit (32 x 32 -> 64 bits), and whose cross terms need only 32 bits.
The high half is zero exactly where a number fits in 32 bits, so tiles of such numbers, which are common, skip the cross
terms. A vector multiplication of 64-bit numbers is no faster. AVX2 has none. AVX-512's, vpmullq, takes as long as three
of these, and on recent cores it has a false dependency on its destination. Compilers work around that only where they
know the core; where LLVM did not, as in a virtual machine, vpmullq ran at a quarter of its speed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from distmm_kernels.device import cpu
from distmm_kernels.kernel import Array

# Four rows of B (4 B a number) and four of C (8 B) take 24 KiB of the first-level cache; the halves of a tile of B
# (128 KiB each) and of A (32 KiB each) stay in the second.
TILE_M, TILE_N, TILE_K = 128, 512, 64


def accumulate(a: Array, b: Array, d: Array) -> None:
    """Add ``a @ b`` to ``d`` modulo 2^bits; the threads of the pool share the tiles of ``d``.

    Parameters
    ----------
    a, b
        int32 or int64, aligned, of any strides: shapes (..., m, k) and (..., k, n), whose batch dimensions broadcast.
    d
        The same type, shape (..., m, n).
    """
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
    run = map if pool is None or len(tiles) == 1 else pool.map
    for _ in run(lambda tile: add_tile(*tile), tiles):
        pass


@functools.cache
def _pool() -> ThreadPoolExecutor | None:
    """Return the only thread pool of the process: it bounds the threads that compute, for any number of Dask threads.

    OMP_NUM_THREADS bounds it as it bounds BLAS. Dask's nanny sets that to 1, since workers run in parallel; then each
    caller computes in its own thread. Numba's own threading layers are not used: the default one
    without TBB or OpenMP, workqueue, aborts the process when two threads call it at once.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdigit() and int(wanted) > 0 else cpu().multiprocessors
    return ThreadPoolExecutor(threads, "distmm-cpu") if threads > 1 else None


# A forked child has the pool's lock but not its threads: let it make its own.
os.register_at_fork(after_in_child=_pool.cache_clear)


@functools.cache
def _compiled(dtype: np.dtype[Any]) -> Callable[[Array, Array, Array], None]:
    """Compile the kernel of one tile for ``dtype``: two seconds, once for each machine if Numba can cache the code."""
    number = from_dtype(dtype)
    operand = types.Array(number, 2, "A", readonly=True)  # any strides; read-only arrays too
    result = types.Array(number, 2, "A")
    signatures = [types.void(operand, operand, result)]
    try:
        return njit(signatures, nogil=True, cache=True)(_add_tile)  # nogil: threads compute tiles in parallel
    except (RuntimeError, OSError):  # no writable folder, or a full disk
        return njit(signatures, nogil=True)(_add_tile)


def _add_tile(a, b, d):
    """``d += a @ b`` for one tile of C: a (m, k), b (k, n), m <= TILE_M, n <= TILE_N; in Numba's language."""
    m, n, depth = d.shape[0], d.shape[1], a.shape[1]
    rows = (m + 3) // 4 * 4  # for _add_packed; rows past m are zeros, and their products are never read
    total = np.zeros((rows, n), d.dtype)
    cross = np.zeros((rows, n), np.int32)
    a_low, a_high = np.zeros((rows, TILE_K), np.int32), np.zeros((rows, TILE_K), np.int32)
    b_low, b_high = np.zeros((TILE_K, n), np.int32), np.zeros((TILE_K, n), np.int32)
    for k0 in range(0, depth, TILE_K):
        k1 = min(k0 + TILE_K, depth)
        a_is_wide = _pack(a[:, k0:k1], a_low, a_high)
        b_is_wide = _pack(b[k0:k1], b_low, b_high)
        steps = (k1 - k0 + 3) // 4 * 4
        # clear values of the last tile; b needs no clearing, since it is multiplied by these zeros of a
        a_low[:, k1 - k0 : steps] = 0
        a_high[:, k1 - k0 : steps] = 0
        _add_packed(a_low, b_low, total, steps)
        if a_is_wide:
            _add_packed(a_high, b_low, cross, steps)
        if b_is_wide:
            _add_packed(a_low, b_high, cross, steps)
    for i in range(m):
        for j in range(n):
            d[i, j] += total[i, j] + (np.int64(cross[i, j]) << 32)


@njit
def _pack(block, low, high):
    """Split ``block`` into signed halves, ``low + 2^32 high``; if all of ``high`` is zero, skip it and return False."""
    wide = np.int64(0)
    for i in range(block.shape[0]):
        for j in range(block.shape[1]):
            number = np.int64(block[i, j])
            low[i, j] = number
            wide |= number - low[i, j]
    if wide == 0:
        return False
    for i in range(block.shape[0]):
        for j in range(block.shape[1]):
            high[i, j] = (block[i, j] - low[i, j]) >> 32
    return True


@njit
def _add_packed(a, b, total, steps):
    """``total += a[:, :steps] @ b[:steps]``, a and b int32, steps and the rows multiples of four.

    Four rows and four steps at a time: 16 products for each four loads of B, and four loads and stores of the sums.
    Numba multiplies as int64; where ``total`` is int32, LLVM sees that the upper half is not wanted.
    """
    for i in range(0, total.shape[0], 4):
        c0, c1, c2, c3 = total[i], total[i + 1], total[i + 2], total[i + 3]
        for k in range(0, steps, 4):
            a0, a1, a2, a3 = _four(a[i], k), _four(a[i + 1], k), _four(a[i + 2], k), _four(a[i + 3], k)
            b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
            for j in range(total.shape[1]):
                column = b0[j], b1[j], b2[j], b3[j]
                c0[j] += _dot(a0, column)
                c1[j] += _dot(a1, column)
                c2[j] += _dot(a2, column)
                c3[j] += _dot(a3, column)


@njit
def _four(row, k):
    return row[k], row[k + 1], row[k + 2], row[k + 3]


@njit
def _dot(x, y):
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3]

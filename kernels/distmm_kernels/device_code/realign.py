"""Copy rows that begin anywhere to rows that begin at whole words, and fill these up with zeros.

Memory is read in words of 4 bytes, whatever the elements: a thread takes the two in which its bytes lie and shifts
them. So a warp reads and writes 128 bytes at a time; element by element it would be 32 of int8 and 64 of 16-bit types.
"""

from __future__ import annotations

from numba import cuda, int64, types, uint64
from numpy import uint32

from distmm_kernels.compiler import Source
from distmm_kernels.vectors import CHUNK, WARPS

__all__ = ["source"]


def source() -> Source:
    """Return the kernel ``(a, start, pitch, step, length, out, rows, words, out_pitch, out_step)``.

    ``a`` and ``out`` are all words of the source and of the result. Row i of matrix b has `length` bytes, from byte
    ``start + b * step + i * pitch`` of the source, and `words` words, from word ``b * out_step + i * out_pitch`` of the
    result. Each warp has a row, or of a long one a part: `CHUNK` words in each ``gridDim.z * CHUNK``.
    """
    ahead = CHUNK // 32  # words of a thread that are under way at the same time

    def realign(a, start, pitch, step, length, out, rows, words, out_pitch, out_step):
        thread, batch = int64(cuda.threadIdx.x), int64(cuda.blockIdx.y)
        row, lane = int64(cuda.blockIdx.x) * WARPS + thread // 32, thread % 32
        if row < rows:
            first = start + batch * step + row * pitch
            word, shift = first >> 2, uint64(8 * (first & 3))
            last = (first + length - 1) >> 2  # of the words that hold bytes of the row
            to = batch * out_step + row * out_pitch
            low, high = cuda.local.array(ahead, types.uint32), cuda.local.array(ahead, types.uint32)
            for chunk in range(int64(cuda.blockIdx.z) * CHUNK, words, int64(cuda.gridDim.z) * CHUNK):
                if word + chunk + CHUNK <= last and 4 * (chunk + CHUNK) <= length:
                    at, to_at = uint64(word + chunk + lane), uint64(to + chunk + lane)  # never negative: no test for it
                    for u in range(ahead):
                        low[u], high[u] = a[at + uint64(32 * u)], a[at + uint64(32 * u + 1)]
                    for u in range(ahead):
                        both = (uint64(high[u]) << uint64(32) | uint64(low[u])) >> shift
                        out[to_at + uint64(32 * u)] = uint32(both)
                else:
                    for at in range(chunk + lane, min(chunk + CHUNK, words), 32):
                        left = min(max(length - 4 * at, 0), 4)  # bytes of the row that this word holds
                        some, others = a[uint64(min(word + at, last))], a[uint64(min(word + at + 1, last))]
                        both = (uint64(others) << uint64(32) | uint64(some)) >> shift
                        out[uint64(to + at)] = uint32(both & ((uint64(1) << uint64(8 * left)) - uint64(1)))

    memory = types.Array(types.uint32, 1, "C")
    signature = types.void(memory, *[types.int64] * 4, memory, *[types.int64] * 4)
    return Source(realign, signature, 32 * WARPS, blocks=1280 // (32 * WARPS))

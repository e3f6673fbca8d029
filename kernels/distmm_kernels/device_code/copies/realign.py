"""Copy rows that begin at any byte to rows that begin at whole words, and complete these with zeros.

Memory is read in words of 4 bytes for all types of elements: a thread reads the two words that contain its bytes, and
shifts them. So a warp reads and writes 128 bytes at a time. Element by element it would be 32 bytes for int8 and 64 for
16-bit types. A word that is partly outside of the source is never read, since it may belong to another array, or exceed
the allocation. Its bytes are read one by one.
"""

from __future__ import annotations

from numpy import uint32

from distmm_kernels.device_code.emit import cuda, i64, types, u64
from distmm_kernels.launch.compiler import Source
from distmm_kernels.layout.copies import CHUNK, WARPS


def source() -> Source:
    """Return the kernel ``(single, whole, lead, start, pitch, step, length, out, rows, words, out_pitch, out_step)``.

    `single` has all bytes from the source's first to its last. `whole` has the aligned words that are completely in
    `single`; the first one begins after `lead` bytes. Row i of matrix b has `length` bytes in the source, from
    ``single[start + b * step + i * pitch]`` on. It has `words` words in the result, from
    ``out[b * out_step + i * out_pitch]`` on. A warp copies a row. Several warps share a long row: each copies `CHUNK`
    words of each ``gridDim.z * CHUNK``.
    """
    ahead = CHUNK // 32  # words that a thread loads before it waits for the first

    def realign(single, whole, lead, start, pitch, step, length, out, rows, words, out_pitch, out_step):
        thread, batch = i64(cuda.threadIdx.x), i64(cuda.blockIdx.y)
        row, lane = i64(cuda.blockIdx.x) * WARPS + thread // 32, thread % 32
        if row < rows:
            first = start + batch * step + row * pitch
            word, shift = (first - lead) >> 2, u64(8 * ((first - lead) & 3))
            to = batch * out_step + row * out_pitch
            low, high = cuda.local.array(ahead, types.uint32), cuda.local.array(ahead, types.uint32)
            for chunk in range(i64(cuda.blockIdx.z) * CHUNK, words, i64(cuda.gridDim.z) * CHUNK):
                inside = word + chunk >= 0 and word + chunk + CHUNK < whole.size
                if inside and 4 * (chunk + CHUNK) <= length:
                    at, to_at = u64(word + chunk + lane), u64(to + chunk + lane)  # unsigned: never negative
                    for u in range(ahead):
                        low[u], high[u] = whole[at + u64(32 * u)], whole[at + u64(32 * u + 1)]
                    for u in range(ahead):
                        both = (u64(high[u]) << u64(32) | u64(low[u])) >> shift
                        out[to_at + u64(32 * u)] = uint32(both)
                else:
                    for at in range(chunk + lane, min(chunk + CHUNK, words), 32):
                        left = min(max(length - 4 * at, 0), 4)  # bytes of the row that this word holds
                        both = u64(0)
                        if word + at >= 0 and word + at + 1 < whole.size:
                            some, others = whole[u64(word + at)], whole[u64(word + at + 1)]
                            both = (u64(others) << u64(32) | u64(some)) >> shift
                        else:
                            for byte in range(left):
                                both |= u64(single[u64(first + 4 * at + byte)]) << u64(8 * byte)
                        out[u64(to + at)] = uint32(both & ((u64(1) << u64(8 * left)) - u64(1)))

    octets, memory = (types.Array(number, 1, "C") for number in (types.uint8, types.uint32))
    signature = types.void(octets, memory, *[i64] * 5, memory, *[i64] * 4)
    return Source(realign, signature, 32 * WARPS, blocks=1280 // (32 * WARPS))

"""Copy a matrix of 8-bit or 16-bit numbers whose columns are contiguous to one whose rows are, by words of 4 bytes.

A word has 2 or 4 elements. A thread reads one word from each of as many neighbouring columns, and combines the elements
of a row to a word of the result. So a warp reads and writes 128 bytes at a time. Element by element it would be 32
bytes for int8. On an H200 this kernel transposes int8 of n = 8192 in 0.06 ms. Element by element it takes 0.16 ms, of
0.87 ms for the product.
"""

from __future__ import annotations

from numpy import uint32

from distmm_kernels.device_code.emit import cuda, types
from distmm_kernels.launch.compiler import Source
from distmm_kernels.layout.copies import TILE, WARPS

int64 = types.int64


def source(elements: int) -> Source:
    """Return the kernel ``(a, out)`` on stacks of words of ``elements`` elements, 2 or 4.

    ``a`` is ``(batch, words down a column, n)``, ``out`` ``(batch, m, words along a row)``; elements of ``out`` beyond
    the columns of ``a`` become 0. A block transposes `TILE` words down of `TILE` words' columns across.
    """
    bits, mask = uint32(32 // elements), uint32((1 << 32 // elements) - 1)
    tile, pitch = uint32(TILE), TILE + 1  # one more: otherwise a warp would write to one bank
    lines = TILE * elements  # of the result

    def transpose(a, out):
        held = cuda.shared.array((elements, TILE, pitch), types.uint32)
        words = cuda.local.array(elements, types.uint32)
        thread, batch = uint32(cuda.threadIdx.x), cuda.blockIdx.y
        x, y = int64(thread % tile), int64(thread // tile)
        wide = uint32((out.shape[2] + TILE - 1) // TILE)
        down = int64(uint32(cuda.blockIdx.x) // wide) * TILE
        across = int64(uint32(cuda.blockIdx.x) % wide) * TILE
        inside = down + TILE <= a.shape[1] and (across + TILE) * elements <= a.shape[2]
        for group in range(y, TILE, WARPS):
            j = (across + group) * elements
            for c in range(elements):
                if inside or (down + x < a.shape[1] and j + c < a.shape[2]):
                    words[c] = a[batch, down + x, j + c]
                else:
                    words[c] = uint32(0)
            for r in range(elements):
                word = uint32(0)
                for c in range(elements):
                    word |= ((words[c] >> (bits * uint32(r))) & mask) << (bits * uint32(c))
                held[r, x, group] = word
        cuda.syncthreads()
        for line in range(y, lines, WARPS):
            i = down * elements + line
            if i < out.shape[1] and across + x < out.shape[2]:
                out[batch, i, across + x] = held[line % elements, line // elements, x]

    stack = types.Array(types.uint32, 3, "A")
    return Source(transpose, types.void(stack, stack), 32 * WARPS, blocks=6)

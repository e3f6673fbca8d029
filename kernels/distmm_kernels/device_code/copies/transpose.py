"""Copy a matrix whose columns are contiguous to one whose rows are.

A tile in shared memory is transposed, so that a warp reads contiguous numbers and writes contiguous numbers.

Elements of 8 or 16 bits are copied by words of 4 bytes, if columns are whole words. A thread reads one word from each
of 2 or 4 neighbouring columns, and combines the elements of a row to a word of the result. So a warp reads and writes
128 bytes at a time. Element by element it would be 32 bytes for int8. On an H200, int8 of n = 8192 takes 0.04 ms by
words, and 0.16 ms by elements, of 0.87 ms for the product.
"""

from __future__ import annotations

import numpy as np
from numpy import uint32

from distmm_kernels.device_code.emit import cuda, from_dtype, i64, inlined, types
from distmm_kernels.launch.compiler import Source
from distmm_kernels.layout.copies import TILE, WARPS


def source(dtype: str, elements: int = 1) -> Source:
    """Return the kernel ``(a, out)`` on stacks of numbers, each of which is one element, or a word of 2 or 4 elements.

    ``a`` is ``(batch, numbers down a column, n)``, ``out`` ``(batch, m, numbers along a row)``; elements of ``out``
    beyond the columns of ``a`` become 0. A block transposes `TILE` numbers down of `TILE` numbers' columns across.
    """
    number, zero = from_dtype(np.dtype(dtype)), np.dtype(dtype).type(0)
    bits, mask = uint32(32 // elements), uint32((1 << 32 // elements) - 1)
    tile, pitch = uint32(TILE), TILE + 1  # one more: otherwise a warp would write to one bank
    groups, lines = TILE // WARPS, TILE * elements  # of a thread; of the result
    loads = groups * elements

    @inlined
    def element(numbers, first, row):
        """Return the elements of one row in ``elements`` numbers, each of another column."""
        if elements == 1:
            return numbers[first]
        word = uint32(0)
        for c in range(elements):
            word |= ((numbers[first + c] >> (bits * uint32(row))) & mask) << (bits * uint32(c))
        return word

    def transpose(a, out):
        held = cuda.shared.array((elements, TILE, pitch), number)
        numbers = cuda.local.array(loads, number)
        thread, batch = uint32(cuda.threadIdx.x), cuda.blockIdx.y
        x, y = i64(thread % tile), i64(thread // tile)
        wide = uint32((out.shape[2] + TILE - 1) // TILE)
        down = i64(uint32(cuda.blockIdx.x) // wide) * TILE
        across = i64(uint32(cuda.blockIdx.x) % wide) * TILE
        inside = down + TILE <= a.shape[1] and (across + TILE) * elements <= a.shape[2]
        for i in range(loads):  # issue all loads before waiting for the first
            j = (across + y + i // elements * WARPS) * elements + i % elements
            if inside or (down + x < a.shape[1] and j < a.shape[2]):
                numbers[i] = a[batch, down + x, j]
            else:
                numbers[i] = zero
        for group in range(groups):
            for row in range(elements):
                held[row, x, y + group * WARPS] = element(numbers, group * elements, row)
        cuda.syncthreads()
        for i in range(lines // WARPS):
            line = y + i * WARPS
            if down * elements + line < out.shape[1] and across + x < out.shape[2]:
                out[batch, down * elements + line, across + x] = held[line % elements, line // elements, x]

    stack = types.Array(number, 3, "A")
    return Source(transpose, types.void(stack, stack), 32 * WARPS, blocks=8 if elements == 1 else 6)

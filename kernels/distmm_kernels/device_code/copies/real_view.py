"""Make the real matrix of a complex B: each line becomes two; the second has real and imaginary parts exchanged.

A thread copies single real numbers. A warp reads and writes whole cache lines, in any order within them.
"""

from __future__ import annotations

import numpy as np
from numpy import uint32

from distmm_kernels.device_code.emit import cuda, from_dtype, i64, types
from distmm_kernels.launch.compiler import Source
from distmm_kernels.layout.real_view import LINES, THREADS


def source(dtype: str, turned: bool) -> Source:
    """Return the kernel ``(a, out)`` on stacks of real lines ``(batch, lines, 2n)`` and ``(batch, 2 lines, width)``.

    Line ``x, y`` becomes ``x, y`` and ``-y, x``; if `turned`, for lines that are columns of B, ``x, -y`` and ``y, x``.
    The remaining elements of ``out``, whose width is even, become 0. Grid: parts of a line, times groups of `LINES`
    lines; matrices.
    """
    number, zero = from_dtype(np.dtype(dtype)), np.dtype(dtype).type(0)

    def double_lines(a, out):
        batch = cuda.blockIdx.y
        wide = uint32((out.shape[2] + THREADS - 1) // THREADS)
        first = i64(uint32(cuda.blockIdx.x) // wide) * LINES
        place = i64(uint32(cuda.blockIdx.x) % wide) * THREADS + i64(cuda.threadIdx.x)
        if place < out.shape[2]:
            held = cuda.local.array(LINES, number)
            for i in range(LINES):  # issue all loads before waiting for the first
                inside = first + i < a.shape[1] and place < a.shape[2]
                held[i] = a[batch, first + i, place] if inside else zero
            imaginary = place & 1 == 1
            for i in range(LINES):
                if first + i < a.shape[1]:
                    x = held[i]
                    out[batch, 2 * (first + i), place] = -x if imaginary and turned else x
                    out[batch, 2 * (first + i) + 1, place ^ 1] = -x if imaginary and not turned else x

    stack = types.Array(number, 3, "A")
    return Source(double_lines, types.void(stack, stack), THREADS, blocks=2048 // THREADS)

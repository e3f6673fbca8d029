"""Complex matrices as real matrices, so that a complex product is one real product.

A complex matrix ``(m, k)`` with contiguous rows is also a real matrix ``(m, 2k)`` in the same memory: re, im, re, im.
B is copied to a real matrix ``(2k, 2n)``: an element ``x + iy`` becomes the block ``[x, y; -y, x]``. The real product
``(m, 2n)`` has the elements of the complex C in the same order: re, im, re, im.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch import launches as launch
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.layout.stack import VECTOR_BYTES
from distmm_kernels.layout.vectors import in_vectors, row_pitch

REALS: dict[str, np.dtype[Any]] = {"complex64": np.dtype("float32"), "complex128": np.dtype("float64")}

THREADS = 256  # of a thread block, along a line
LINES = 4  # of B that a thread block doubles; a thread has this many loads in flight


def in_rows(block: Array, device: Device) -> Array:
    """Return matrices with contiguous rows: the block itself if its rows are contiguous, else a copy."""
    return block if block.strides[-1] == block.itemsize else in_vectors(block, device)


def as_real(rows: Array) -> Array:
    """Return complex matrices ``(*batch, m, k)`` with contiguous rows as real ones ``(*batch, m, 2k)``: a view."""
    *others, columns = rows.shape
    dtype = REALS[rows.dtype.name]
    if isinstance(rows, np.ndarray):
        return rows.view(dtype)
    # CuPy's own view needs contiguous matrices; here only the rows are
    return type(rows)((*others, 2 * columns), dtype, rows.data, (*rows.strides[:-1], dtype.itemsize))


def doubled(block: Array, device: Device, conjugated: bool = False) -> Array:
    """Return the real matrices ``(*batch, 2k, 2n)`` of complex ones ``(*batch, k, n)``, or of their conjugates.

    If the columns of the block are contiguous, those of the result are, too; otherwise its rows are.
    """
    turned = block.strides[-1] != block.itemsize and block.strides[-2] == block.itemsize
    # the transpose of [x, y; -y, x] is [x, -y; y, x]; so is the block of a conjugate
    lines = as_real(in_rows(block.swapaxes(-1, -2) if turned else block, device))
    *others, count, length = lines.shape
    filled = -(-length * lines.itemsize // VECTOR_BYTES) * VECTOR_BYTES // lines.itemsize
    pitch = row_pitch(length, lines.itemsize)
    made: Array = type(lines)((*others, 2 * count, pitch), lines.dtype)
    if lines.size:
        recipe = Recipe("distmm_kernels.device_code.copies.real_view:source", (lines.dtype.name, turned != conjugated))
        for source, target in launch.matrices(lines, made[..., :filled]):
            launch.enqueue(recipe, device, -(-count // LINES) * -(-filled // THREADS), source, target)
    made = made[..., :length]
    return made.swapaxes(-1, -2) if turned else made

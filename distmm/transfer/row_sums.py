"""Sums of the words in each row of a block: a checksum that a GPU computes at the speed of its memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

# Bytes of rows in host memory that are copied at a time. On a GPU it is 64 times as much.
PIECE = 2**20


def row_sums(block: Any) -> Any:
    """Sum the words of each row times fixed odd numbers, modulo 2**64, on the device of the block.

    Any change of a single word changes the sum of its row. A change of several words is missed with probability 2**-63.
    Integers have no rounding, so the sums do not depend on the order of the additions.

    Parameters
    ----------
    block : NumPy or CuPy array of shape (m, n)
        If each row has a multiple of 8 bytes, words have 8 bytes; otherwise the largest of 4, 2 and 1 that divides it.

    Returns
    -------
    array of m uint64
        On the device of `block`. On a GPU the sums are ready when the current stream has computed them.
    """
    width = block.shape[1] * block.itemsize
    size = next(size for size in (8, 4, 2, 1) if width % size == 0)
    odd = np.random.default_rng(0).integers(0, 2**64, width // size, dtype=np.uint64) | np.uint64(1)
    if hasattr(block, "__cuda_array_interface__"):
        return _on_gpu(block, odd, size)
    sums = np.empty(len(block), np.uint64)
    for first, rows in pieces(block, PIECE):
        sums[first : first + len(rows)] = (rows.view(f"u{size}") * odd).sum(axis=1, dtype=np.uint64)
    return sums


def _on_gpu(block: Any, odd: np.ndarray, size: int) -> Any:
    """Sum by one kernel that reads each word once. Rows that are not contiguous are copied first, a part at a time."""
    import cupy

    sums, factors = cupy.empty(len(block), np.uint64), cupy.asarray(odd)
    for first, rows in pieces(block, block.nbytes if block.flags.c_contiguous else 64 * PIECE):
        _sums()(rows.view(f"u{size}"), factors, sums[first : first + len(rows)], axis=1)
    return sums


@functools.cache
def _sums() -> Any:
    import cupy

    return cupy.ReductionKernel(
        "T word, uint64 odd", "uint64 total", "word * odd", "a + b", "total = a", "0", "distmm_row_sums"
    )


def pieces(block: Any, most: int) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a block in C order, `most` bytes at a time, with the number of the first row of each piece."""
    height = max(1, most // (block.shape[1] * block.itemsize))
    for first in range(0, len(block), height):
        rows = block[first : first + height]
        yield first, rows if rows.flags.c_contiguous else rows.copy(order="C")

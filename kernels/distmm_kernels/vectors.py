"""Matrices in GPU memory whose rows can be copied 16 bytes at a time, and how others become such."""

from __future__ import annotations

import math

import numpy as np

from distmm_kernels import driver, launch
from distmm_kernels.binary import Recipe
from distmm_kernels.device import Device
from distmm_kernels.kernel import Array

__all__ = ["CHUNK", "TILE", "VECTOR_BYTES", "WARPS", "has_vectors", "in_vectors", "row_pitch"]

VECTOR_BYTES = 16  # the widest load of a thread

TILE = 32  # rows and columns of what a block transposes

WARPS, CHUNK = 8, 128  # of a block that shifts rows, and words of 4 bytes that one of them has under way

LINE_BYTES = 128  # of the second-level cache
LONG_ROW_BYTES = 2048  # from here on whole lines take at most 6 % more memory


def has_vectors(array: Array, axis: int) -> bool:
    """Whether neighbours along the axis, -1 or -2, touch, and every line along it begins at a multiple of 16 bytes."""
    strides = array.strides
    touch = strides[axis] == array.itemsize or array.shape[axis] == 1
    across = strides[-3 - axis]  # the other of the last two
    return touch and not any(number % VECTOR_BYTES for number in (launch.address(array), across, *strides[:-2]))


def in_vectors(rows: Array, device: Device) -> Array:
    """Copy to rows that `has_vectors`, filled up to whole vectors with zeros.

    Long ones begin at lines of the cache: the rows of a tile, each of 128 bytes, are then read as whole lines.

    Parameters
    ----------
    rows
        ``(*batch, m, n)`` on the device, with any strides.
    """
    *others, m, length = rows.shape
    whole = np.empty_like(rows, shape=(*others, m, row_pitch(length, rows.itemsize)), order="C")
    filled_bytes = _up(length * rows.itemsize, VECTOR_BYTES)
    filled = whole[..., : filled_bytes // rows.itemsize]
    if not rows.size:
        return whole[..., :length]
    if rows.strides[-1] == rows.itemsize or length == 1:
        words = whole.view(np.uint32)[..., : filled_bytes // 4]
        for source, _, _, target in launch.matrices(rows, rows, None, words):
            _realign(source, target, device)
    elif abs(rows.strides[-2]) < abs(rows.strides[-1]):  # read down columns, which are contiguous or nearly so
        bits = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}[rows.itemsize]
        recipe = Recipe("distmm_kernels.device_code.transpose:source", (bits,))
        tiles = -(-m // TILE) * -(-filled.shape[-1] // TILE)
        for source, _, _, target in launch.matrices(rows.view(bits), rows, None, filled.view(bits)):
            blocks = tiles, math.prod(target.shape[:-2])
            launch.Launch(recipe, device, blocks, (source, target))(source, target)
    else:
        filled[..., :length], filled[..., length:] = rows, 0
    return whole[..., :length]


def row_pitch(columns: int, itemsize: int) -> int:
    """Elements from a row to the next in memory of our own: whole lines of the cache, or vectors where rows are short.

    On an H200 TF32 products of 8191 x 8193 by 8193 x 8190, prepared, ran at 259 TFLOP/s where rows began at multiples
    of 16 bytes that are none of 128, and run at 409 since they begin at lines (8192: 401 and 397 in the same runs).
    """
    row = columns * itemsize
    return _up(row, LINE_BYTES if row >= LONG_ROW_BYTES else VECTOR_BYTES) // itemsize


def _realign(source: Array, target: Array, device: Device) -> None:
    """Copy matrices whose rows are contiguous, one or a stack, to such of words."""
    *batch, rows, words = target.shape
    *steps, pitch, _ = source.strides
    *out_steps, out_pitch, _ = target.strides
    matrices, step, out_step = (batch[0], steps[0], out_steps[0]) if batch else (1, 0, 0)
    length = source.shape[-1] * source.itemsize
    ends = [(rows - 1) * pitch, (matrices - 1) * step]  # negative where rows or matrices are in reverse
    first, size = launch.address(source) + sum(min(0, end) for end in ends), sum(map(abs, ends)) + length
    lead = -first % 4  # bytes before the first whole word
    values = (
        *_memory(first, size, 1),
        *_memory(first + lead, max(0, size - lead) // 4, 4),
        *(lead, launch.address(source) - first, pitch, step, length),
        *_memory(launch.address(target), (matrices - 1) * out_step // 4 + (rows - 1) * out_pitch // 4 + words, 4),
        *(rows, words, out_pitch // 4, out_step // 4),
    )
    # a warp has up to 4 chunks of a row: enough warps for few long rows too
    grid = -(-rows // WARPS), matrices, min(-(-words // (4 * CHUNK)), launch.MAX_GRID_Y)
    driver.loaded(Recipe("distmm_kernels.device_code.realign:source"), device).launch(grid, (), values)


def _memory(address: int, count: int, itemsize: int) -> tuple[int, ...]:
    """Return arguments for an array of bytes or words, as `driver.array_arguments` gives them."""
    return 0, 0, count, itemsize, address, count, itemsize


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

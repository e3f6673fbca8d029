"""Matrices in GPU memory with rows of aligned 16-byte vectors, and the copies that make them."""

from __future__ import annotations

import functools

import numpy as np

from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch import driver
from distmm_kernels.launch import launches as launch
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.layout import stack
from distmm_kernels.layout.copies import CHUNK, REALIGN, TILE, WARPS, choose
from distmm_kernels.layout.stack import VECTOR_BYTES, Stack, distinct

LINE_BYTES = 128  # a line of the L2 cache
LONG_ROW_BYTES = 2048  # from this size on, padding to whole lines takes at most 6 % more memory


def has_vectors(array: Array, axis: int) -> bool:
    """Whether the axis, -1 or -2, is contiguous, and every line along it begins at a multiple of 16 bytes."""
    return Stack.of(array).has_vectors(axis)


def in_vectors(rows: Array, device: Device) -> Array:
    """Copy matrices to rows of aligned vectors. The last vector of a row is padded with zeros.

    Long rows begin at lines of the L2 cache. Then the rows of a tile, of 128 bytes each, are read as whole lines. A
    matrix that a broadcast repeats is copied once.

    Parameters
    ----------
    rows
        ``(*batch, m, n)`` on the device, with any strides.
    """
    shape, rows = rows.shape, distinct(rows)
    *others, m, length = rows.shape
    itemsize = rows.itemsize
    whole = type(rows)((*others, m, row_pitch(length, itemsize)), rows.dtype)  # NumPy's or CuPy's, not initialised
    filled = _up(length * itemsize, VECTOR_BYTES)  # bytes
    if rows.size:
        recipe = choose(Stack.of(rows))
        if recipe is None:
            whole[..., :length], whole[..., length : filled // itemsize] = rows, 0
        for source, target in launch.matrices(rows, whole) if recipe else ():
            if recipe is REALIGN:
                _realign(Stack.of(source), Stack.of(target), filled, device)
            else:
                given = Stack.of(source).at(0), Stack.of(target).at(0)
                _transposition(recipe, *given, filled, device)(stack.address(source), stack.address(target))
    made = whole if whole.shape[-1] == length else whole[..., :length]
    return made if made.shape == shape else np.broadcast_to(made, shape)  # NumPy dispatches CuPy's arrays to CuPy


def row_pitch(columns: int, itemsize: int) -> int:
    """Return the leading dimension of a copy, in elements: rows fill whole cache lines, or vectors if they are short.

    On an H200, TF32 products of 8191 x 8193 by 8193 x 8190 on prepared operands run at 409 TFLOP/s if rows begin at
    cache lines, and at 259 if they begin at other multiples of 16 bytes (n = 8192: 397 and 401).
    """
    row = columns * itemsize
    return _up(row, LINE_BYTES if row >= LONG_ROW_BYTES else VECTOR_BYTES) // itemsize


@functools.lru_cache(maxsize=1024)
def _transposition(recipe: Recipe, source: Stack, target: Stack, filled: int, device: Device) -> launch.Launch:
    """Return the launch that transposes columns into rows. It writes the first ``filled`` bytes of each row."""
    (matrices, m, n), (step, _, pitch), itemsize = source[1:]
    if recipe.parameters[1] > 1:  # elements of a word
        source = Stack(0, (matrices, m * itemsize // 4, n), (step, 4, pitch), 4)
        target = Stack(0, (matrices, m, filled // 4), (*target.strides[:2], 4), 4)
    else:
        target = target._replace(shape=(matrices, m, filled // itemsize))
    blocks = -(-source.rows // TILE) * -(-target.columns // TILE), matrices
    return launch.Launch(recipe, device, blocks, (source, target))


def _realign(source: Stack, target: Stack, filled: int, device: Device) -> None:
    """Copy matrices with contiguous rows, and write the first ``filled`` bytes of each row of the target."""
    start, (matrices, rows, columns), (step, pitch, _), itemsize = source
    out_step, out_pitch, _ = target.strides
    length, words = columns * itemsize, filled // 4
    ends = (rows - 1) * pitch, (matrices - 1) * step  # negative if strides are negative
    first, size = start + sum(min(0, end) for end in ends), sum(map(abs, ends)) + length
    lead = -first % 4  # bytes before the first aligned word
    values = (
        *driver.array_arguments(first, (size,), (1,), 1),
        *driver.array_arguments(first + lead, (max(0, size - lead) // 4,), (4,), 4),
        *(lead, start - first, pitch, step, length),
        *driver.array_arguments(target.address, (matrices * rows * out_pitch // 4,), (4,), 4),
        *(rows, words, out_pitch // 4, out_step // 4),
    )
    # a warp copies up to 4 chunks of a row, so that a few long rows have enough warps too
    grid = -(-rows // WARPS), matrices, min(-(-words // (4 * CHUNK)), launch.MAX_GRID_Y)
    driver.loaded(REALIGN, device).launch(grid, values)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

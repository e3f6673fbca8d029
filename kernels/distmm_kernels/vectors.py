"""Matrices in GPU memory whose rows can be copied 16 bytes at a time, and how others become such."""

from __future__ import annotations

import functools

from distmm_kernels import driver, launch
from distmm_kernels.binary import Recipe
from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.tiling import VECTOR_BYTES

__all__ = ["CHUNK", "TILE", "VECTOR_BYTES", "WARPS", "has_vectors", "in_vectors", "row_pitch"]

TILE = 32  # rows and columns of what a block transposes

WARPS, CHUNK = 8, 128  # of a block that shifts rows, and words of 4 bytes that one of them has under way

LINE_BYTES = 128  # of the second-level cache
LONG_ROW_BYTES = 2048  # from here on whole lines take at most 6 % more memory

NUMBERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}  # that elements are copied as, by bytes
REALIGN = Recipe("distmm_kernels.device_code.realign:source")


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
    itemsize, strides = rows.itemsize, rows.strides
    whole = type(rows)((*others, m, row_pitch(length, itemsize)), rows.dtype)  # NumPy's and CuPy's: memory as it is
    filled = _up(length * itemsize, VECTOR_BYTES)  # bytes
    if not rows.size:
        pass
    elif strides[-1] == itemsize or length == 1:
        for source, _, _, target in launch.matrices(rows, rows, None, whole):
            _realign(source, target, filled, device)
    elif abs(strides[-2]) < abs(strides[-1]):  # read down columns, which are contiguous or nearly so
        for source, _, _, target in launch.matrices(rows, rows, None, whole):
            whole_words = launch.address(source) % 4 == 0
            transposition = _transposition(
                launch.Stack.of(source), launch.Stack.of(target), filled, device, whole_words
            )
            transposition(launch.address(source), launch.address(target))
    else:
        whole[..., :length], whole[..., length : filled // itemsize] = rows, 0
    return whole if whole.shape[-1] == length else whole[..., :length]


def row_pitch(columns: int, itemsize: int) -> int:
    """Elements from a row to the next in memory of our own: whole lines of the cache, or vectors where rows are short.

    On an H200 TF32 products of 8191 x 8193 by 8193 x 8190, prepared, ran at 259 TFLOP/s where rows began at multiples
    of 16 bytes that are none of 128, and run at 409 since they begin at lines (8192: 401 and 397 in the same runs).
    """
    row = columns * itemsize
    return _up(row, LINE_BYTES if row >= LONG_ROW_BYTES else VECTOR_BYTES) // itemsize


@functools.lru_cache(maxsize=1024)
def _transposition(
    source: launch.Stack, target: launch.Stack, filled: int, device: Device, whole_words: bool
) -> launch.Launch:
    """Return the launch that copies matrices whose columns are contiguous to rows of which so many bytes are filled.

    Small numbers go by words, if all columns begin at whole ones (the first one does: `whole_words`) and end with them.
    """
    (matrices, m, n), (step, down, pitch), itemsize = source
    if whole_words and down == itemsize <= 2 and not (m * itemsize % 4 or step % 4 or pitch % 4):
        recipe = Recipe("distmm_kernels.device_code.transpose_words:source", (4 // itemsize,))
        source = launch.Stack((matrices, m * itemsize // 4, n), (step, 4, pitch), 4)
        target = launch.Stack((matrices, m, filled // 4), (*target.strides[:2], 4), 4)
    else:
        recipe = Recipe("distmm_kernels.device_code.transpose:source", (NUMBERS[itemsize],))
        target = target._replace(shape=(matrices, m, filled // itemsize))
    blocks = -(-source.shape[1] // TILE) * -(-target.shape[2] // TILE), matrices
    return launch.Launch(recipe, device, blocks, (source, target))


def _realign(source: Array, target: Array, filled: int, device: Device) -> None:
    """Copy matrices whose rows are contiguous, one or a stack, to rows of which so many bytes are filled."""
    (matrices, rows, columns), (step, pitch, _), itemsize = launch.Stack.of(source)
    _, (out_step, out_pitch, _), _ = launch.Stack.of(target)
    start, length, words = launch.address(source), columns * itemsize, filled // 4
    ends = (rows - 1) * pitch, (matrices - 1) * step  # negative where rows or matrices are in reverse
    first, size = start + sum(min(0, end) for end in ends), sum(map(abs, ends)) + length
    lead = -first % 4  # bytes before the first whole word
    values = (
        *driver.array_arguments(first, (size,), (1,), 1),
        *driver.array_arguments(first + lead, (max(0, size - lead) // 4,), (4,), 4),
        *(lead, start - first, pitch, step, length),
        *driver.array_arguments(launch.address(target), (matrices * rows * out_pitch // 4,), (4,), 4),
        *(rows, words, out_pitch // 4, out_step // 4),
    )
    # a warp has up to 4 chunks of a row: enough warps for few long rows too
    grid = -(-rows // WARPS), matrices, min(-(-words // (4 * CHUNK)), launch.MAX_GRID_Y)
    driver.loaded(REALIGN, device).launch(grid, (), values)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

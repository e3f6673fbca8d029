"""Matrices in GPU memory whose rows can be copied 16 bytes at a time, and how others become such."""

from __future__ import annotations

import math

import numpy as np

from distmm_kernels import launch
from distmm_kernels.binary import Recipe
from distmm_kernels.device import Device
from distmm_kernels.kernel import Array

__all__ = ["TILE", "VECTOR_BYTES", "has_vectors", "in_vectors"]

VECTOR_BYTES = 16  # the widest load of a thread

TILE = 32  # rows and columns of what a block transposes


def has_vectors(array: Array, axis: int) -> bool:
    """Whether neighbours along the axis, -1 or -2, touch, and every line along it begins at a multiple of 16 bytes."""
    strides = array.strides
    touch = strides[axis] == array.itemsize or array.shape[axis] == 1
    across = strides[-3 - axis]  # the other of the last two
    return touch and not any(number % VECTOR_BYTES for number in (launch.address(array), across, *strides[:-2]))


def in_vectors(rows: Array, device: Device) -> Array:
    """Copy to rows that `has_vectors`, filled up to whole vectors with zeros.

    Parameters
    ----------
    rows
        ``(*batch, m, n)`` on the device, with any strides.
    """
    *others, m, length = rows.shape
    vector = VECTOR_BYTES // rows.itemsize
    width = -(-length // vector) * vector
    whole = np.empty_like(rows, shape=(*others, m, width), order="C")
    if abs(rows.strides[-2]) < abs(rows.strides[-1]):  # read down columns, which are contiguous or nearly so
        recipe = Recipe("distmm_kernels.device_code.transpose:source", (rows.dtype.name,))
        tiles = -(-m // TILE) * -(-width // TILE)
        for source, _, _, target in launch.matrices(rows, rows, None, whole) if whole.size else ():
            launch.Launch(recipe, device, (tiles, math.prod(target.shape[:-2])), (source, target))(source, target)
    else:
        whole[..., :length], whole[..., length:] = rows, 0
    return whole[..., :length]

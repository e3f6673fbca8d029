"""8-bit floats (float8_e4m3fn, float8_e5m2) on GPUs, for which CuPy has no types.

A CuPy array of them has a structured type with one field of a byte, which is named like the type.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm_kernels.config import FLOAT8

Array = Any  # numpy.ndarray or cupy.ndarray

_CARRIERS = {dtype: np.dtype([(dtype.name, np.uint8)]) for dtype in FLOAT8}
_NATIVE = {carrier: dtype for dtype, carrier in _CARRIERS.items()}


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of the numbers in an array of this type: that of `ml_dtypes` for a structured type."""
    return _NATIVE.get(dtype, dtype) if dtype.names else dtype


def carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of CuPy arrays of these numbers: the type itself, or a structured one for 8-bit floats."""
    return _CARRIERS.get(dtype, dtype)


def widened(block: Array) -> Array:
    """Return 8-bit floats as float16, which has all of their values. Other arrays are returned unchanged."""
    dtype = native(block.dtype)
    if dtype not in FLOAT8:
        return block
    words = block.view(np.uint8).astype(np.uint16)
    if dtype.name == "float8_e5m2":  # the upper byte of a float16
        return (words << 8).view(np.float16)
    # sign, 4 bits of exponent with bias 7 instead of 15, 3 bits of mantissa; the largest pattern is NaN
    nan = (words & 0x7F == 0x7F).astype(np.uint16) * np.uint16(0x7E00)
    return ((words & 0x80) << 8 | (words & 0x7F) << 7 | nan).view(np.float16) * np.float16(256)

"""CRC-32C of blocks, without keeping other threads from running."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import cache

import google_crc32c
import numpy as np

__all__ = ["checksum"]


def checksum(block: np.ndarray) -> int:
    """CRC-32C of the elements in C order."""
    return _crc32c()(np.ascontiguousarray(block).reshape(-1).view(np.uint8))


@cache
def _crc32c() -> Callable[[np.ndarray], int]:
    """Return the function of the C library that google_crc32c carries.

    Called through the package it holds Python's lock: 0.6 s for a block of 5 GB, in which no other task gets on.
    """
    try:
        library = ctypes.CDLL(str(importlib.import_module("google_crc32c._crc32c").__file__))
        extend = library.crc32c_extend
    except (ImportError, OSError, AttributeError):  # another build of the package, or the one in Python
        return lambda data: int(google_crc32c.value(data))
    extend.argtypes, extend.restype = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint32
    return lambda data: int(extend(0, data.ctypes.data, data.nbytes))

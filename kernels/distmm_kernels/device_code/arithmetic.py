"""One step of an inner product. The result has the same bits wherever the loop over k is split.

A real float takes one fused multiply-add, a complex number four. They are written out, so that the compiler does not
decide which product is rounded first. Integers are cast back at once. Otherwise Numba would widen int32 to int64, and
multiply 64 bits although the upper half is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from distmm_kernels.device_code.emit import cuda, from_dtype, inlined


@functools.cache
def multiply_add(dtype: np.dtype[Any]) -> Callable[[Any, Any, Any], Any]:
    """Make the device function ``(acc, x, y) -> acc + x * y`` for a supported type."""
    number = from_dtype(dtype)

    def integer(acc, x, y):
        return number(acc + x * y)

    def real(acc, x, y):
        return cuda.fma(x, y, acc)

    def complex_(acc, x, y):
        re = cuda.fma(-x.imag, y.imag, cuda.fma(x.real, y.real, acc.real))
        im = cuda.fma(x.imag, y.real, cuda.fma(x.real, y.imag, acc.imag))
        return number(complex(re, im))

    step = {"i": integer, "f": real, "c": complex_}[str(dtype.kind)]
    return inlined(step)

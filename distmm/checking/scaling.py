"""Powers of two that give the rows and columns of a check a common size. Most matrices need none (`uneven`).

The sum of a row of C times a random vector has 16 digits in float64. If the columns of B differ in size by more than
that, the small columns of C are lost in the sum. If elements are near 1e308 or 1e-308, their squares leave float64's
range. The check then multiplies rows and columns by powers of two, which is exact.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from distmm.worker.gpu import namespace, numbers
from distmm.worker.gpu_copies import to_host

# Exponents of rows or columns of zeros, and of those with inf or NaN.
EMPTY, SPOILT = -(2**20), 2**20

# Columns are summed without scaling if the exponents of their largest elements differ by no more than this. Columns of
# standard normal numbers differ by at most 2.
EVEN = 3

# Products of three elements, and sums of squares, stay in float64's range if the exponents of elements are no larger.
SAFE = 300

# Sums of squares in this range are accurate: squares below 2**-1022, which underflow, are negligible.
LEAST_SQUARES, MOST_SQUARES = 2.0**-900, 2.0**900

# Largest exponent of a weight: its inverse is a normal float64, and so is a sum over any number of columns.
MOST = 960

Block = Any  # a NumPy or CuPy array


def exponents(largest: np.ndarray) -> np.ndarray:
    """Return e for each absolute value, which is below ``2**e``. `EMPTY` for 0, `SPOILT` for inf and NaN."""
    found = np.asarray(np.frexp(largest)[1], np.int32)
    found[largest == 0] = EMPTY
    found[~np.isfinite(largest)] = SPOILT
    return found


def uneven(found: np.ndarray) -> bool:
    """Whether lines with these exponents need divisors: they differ much in size, or squares may leave the range."""
    known = found[(found != EMPTY) & (found != SPOILT)]
    most, least = int(known.max(initial=-SAFE)), int(known.min(initial=SAFE))
    return bool((found == SPOILT).any() or most - least > EVEN or most > SAFE or least < -SAFE)


def weights(found: np.ndarray, least: int = -MOST) -> np.ndarray:
    """Return the exponents of the divisors of columns, at least `least`. Columns of zeros get the largest exponent."""
    known = found[(found != EMPTY) & (found != SPOILT)]
    filled = np.where(found == EMPTY, known.max() if known.size else 0, found)
    clipped = filled.clip(min(max(least, -MOST), MOST), MOST)
    return np.asarray(np.where(found == SPOILT, SPOILT, clipped), np.int32)


def scaled(values: Block, exponent: Any) -> Block:
    """Multiply float64 or complex128 values by ``2**exponent``, exactly unless the result leaves float64's range."""
    xp = namespace(values)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if values.dtype.kind != "c":
            return xp.ldexp(values, exponent)
        real = xp.ldexp(values.real, exponent)
        out = xp.empty(real.shape, values.dtype)
        out.real, out.imag = real, xp.ldexp(values.imag, exponent)
        return out


def normalised(part: Block) -> tuple[Block, np.ndarray, np.ndarray]:
    """Divide rows by powers of two if the sum of their squares would leave float64's range.

    Returns the rows, and in host memory their norms and the exponents of the divisors: 0 for most rows, and `EMPTY`
    for a row of zeros. On a GPU only sums over rows run there: CuPy compiles each other operation at its first use on a
    machine, and `any` takes 4 s.
    """
    found = np.zeros(part.shape[0], np.int32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = to_host(_squares(part))
        odd = ~((squares > LEAST_SQUARES) & (squares < MOST_SQUARES))
        if part.size and odd.any():
            largest = to_host(abs(part).max(axis=1))
            own = np.where(odd & np.isfinite(largest), np.frexp(largest)[1], 0)
            found = np.where(largest == 0, EMPTY, own).astype(np.int32)
            part = scaled(part, namespace(part).asarray(-found[:, None]))
            squares = to_host(_squares(part))
        return part, np.sqrt(squares), found


def widened(values: Block) -> Block:
    """Convert float32 and complex64 values in GPU memory to double precision, with subnormal numbers.

    CuPy compiles its casts with -ftz=true, which flushes subnormal float32 numbers to zero. An instruction that is
    written out does not flush. 8-bit floats on a GPU become float16. Other values, and those in host memory, are
    returned unchanged.
    """
    values = numbers(values)
    if isinstance(values, np.ndarray) or values.dtype not in (np.float32, np.complex64):
        return values
    if values.dtype.kind == "c":
        out = namespace(values).empty(values.shape, np.complex128)
        out.real, out.imag = widened(values.real), widened(values.imag)
        return out
    return _exact_cast()(values.view(np.uint32))


@cache
def _exact_cast() -> Any:
    import cupy

    cast = 'asm("{ .reg .f32 t; mov.b32 t, %1; cvt.f64.f32 %0, t; }" : "=d"(wide) : "r"(bits))'
    return cupy.ElementwiseKernel("uint32 bits", "float64 wide", cast, "distmm_exact_cast")


def _squares(part: Block) -> Block:
    """Return the sum of squares of each row."""
    squares = np.vecdot(part, part) if isinstance(part, np.ndarray) else (part * part.conj()).sum(axis=1)
    return squares.real

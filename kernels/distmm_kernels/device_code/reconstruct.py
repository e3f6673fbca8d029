"""Compute float64 numbers from their residues, and add them to C.

Weights are split into three parts of 42 bits. The sums of residues times each part are exact in float64, and stay exact
when a multiple of P is subtracted. So a number is rounded twice: when its parts are added, and when C is added.

Where a GPU has few float64 units, the sums are added as integers of 64 bits, which are then converted. This too is
exact, so the bits of the result are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code import emit
from distmm_kernels.device_code.emit import F64, I32, I64, cuda, f64, i32, inlined, types, u32, u64
from distmm_kernels.device_code.residues import read_double, store_double
from distmm_kernels.emulation.moduli import OFFSET, PRODUCT, UNITS, WEIGHTS, digits
from distmm_kernels.emulation.residues import COLUMNS, THREADS
from distmm_kernels.launch.compiler import Source

load_factor = emit.instruction("ld.global.nc.f64 $0, [$1];", (u64,), f64, pure=True)
store_pair = emit.instruction("st.global.v2.f64 [$0], {$1, $2};", (u64, f64, f64))


_to_float64 = emit.assembly("cvt.rn.f64.s64 $0, $1;", [F64], [I64], pure=True)


_load_word = emit.assembly("ld.global.b32 $0, [$1];", [I32], [I64])


def words_of(builder: Any, address: Any, step: Any, count: int) -> list[Any]:
    """Write the loads of the residues of four neighbours modulo ``count`` numbers, ``step`` bytes apart.

    A byte of the words has `OFFSET` more than its residue, so that none is negative.
    """
    words = []
    for _ in range(count):
        words.append(builder.xor(_load_word(builder, [address])[0], I32(0x80808080)))
        address = builder.add(address, step)
    return words


def byte_of(builder: Any, word: Any, column: int) -> Any:
    """Write the extraction of a byte of a word."""
    return builder.and_(builder.lshr(word, I32(8 * column)), I32(0xFF))


def first_sums(by_integers: bool) -> list[Any]:
    """Return the values with which the three sums begin.

    Each byte that is added later is its residue plus `OFFSET`. Integer sums begin at minus what these offsets add.
    """
    if by_integers:
        return [I64(-OFFSET * sum(each)) for each in zip(*map(digits, WEIGHTS), strict=True)]
    return [emit.constant(F64, 0.0)] * len(UNITS)


def add_weighted(builder: Any, sums: list[Any], byte: Any, weight: int, by_integers: bool) -> list[Any]:
    """Write the addition of a residue times the three parts of its weight. ``byte`` is the residue plus `OFFSET`."""
    wide = builder.zext(byte, I64)
    if by_integers:
        products = [builder.mul(wide, I64(digit)) for digit in digits(weight)]
        return [builder.add(total, product) for total, product in zip(sums, products, strict=True)]
    # the bits of 2^52 + byte; a conversion would take four times as long
    bits = builder.or_(wide, I64((1023 + 52) << 52))
    residue = builder.fsub(builder.bitcast(bits, F64), emit.constant(F64, 2.0**52 + OFFSET))
    parts = [emit.constant(F64, math.ldexp(digit, unit)) for digit, unit in zip(digits(weight), UNITS, strict=True)]
    return [builder.fma(residue, part, total) for part, total in zip(parts, sums, strict=True)]


def converted(builder: Any, sums: list[Any], by_integers: bool) -> list[Any]:
    """Write the conversion of three sums to float64, which is exact: the integers are below 2^53."""
    if not by_integers:
        return sums
    units = (emit.constant(F64, 2.0**unit) for unit in UNITS)
    return [builder.fmul(_to_float64(builder, [total])[0], unit) for total, unit in zip(sums, units, strict=True)]


def _sums_of_four(by_integers: bool) -> Callable[..., Any]:
    """Make ``(address, step)``: three exact sums for each of four neighbours, modulus by modulus ``step`` bytes apart.

    The residues of the four are in one word.
    """

    def write(builder, address, step):
        words, results = words_of(builder, address, step, len(WEIGHTS)), []
        for column in range(COLUMNS):
            sums = first_sums(by_integers)
            for word, weight in zip(words, WEIGHTS, strict=True):
                sums = add_weighted(builder, sums, byte_of(builder, word, column), weight, by_integers)
            results += converted(builder, sums, by_integers)
        return results

    return emit.intrinsic(write, (u64, u64), (f64,) * (len(UNITS) * COLUMNS))


to_nearest = emit.instruction("cvt.rni.f64.f64 $0, $1;", (f64,), f64, pure=True)

_inverse = f64(1 / PRODUCT)
_high, _middle, _low = (f64(math.ldexp(d, unit)) for d, unit in zip(digits(PRODUCT), UNITS, strict=True))


@inlined
def integer(first, second, third):
    """Return the integer between -P/2 and P/2 that three sums represent, rounded to float64."""
    quotient = to_nearest(first * _inverse)
    return (first - _high * quotient) + ((second - _middle * quotient) + (third - _low * quotient))


def of_fours(four: Callable[..., Any], store: Callable[..., None], itemsize: int, blocks: int) -> Source:
    """Return the kernel in which a thread computes four neighbours of D from their residues.

    ``four(address, step)`` reads the residues. ``store(found, mine, theirs, c, c_along, d, left)`` writes ``left``
    elements of D. It takes what ``four`` returned, and the addresses of the row's factor, the first column's factor, C
    and D. Grid: enough threads, 1, 1. The kernel's parameters are unsigned integers of 64 bits:

    residues, step, pitch
        Address of the residues ``(moduli, rows, columns)``; bytes from one modulus to the next, and from one row to the
        next.
    row_factors, column_factors
        Addresses of the factors, if there are any.
    d, d_pitch
        Address of D; bytes from one row to the next. Both are multiples of 16.
    c, c_pitch, c_along
        Address of C; bytes from one row to the next, and from one column to the next.
    rows, columns
        Sizes of D.
    """

    def kernel(
        residues, step, pitch, row_factors, column_factors, d, d_pitch, c, c_pitch, c_along, rows, columns,
    ):  # fmt: skip
        fours = u32((columns + u64(COLUMNS - 1)) // u64(COLUMNS))
        place = u64(cuda.blockIdx.x) * u64(THREADS) + u64(cuda.threadIdx.x)
        if place < rows * u64(fours):
            row = u64(place // u64(fours))
            column = (place - row * u64(fours)) * u64(COLUMNS)
            left = i32(min(columns - column, u64(COLUMNS)))
            found = four(residues + row * pitch + column, step)
            mine, theirs = row_factors + row * u64(8), column_factors + column * u64(8)
            from_c, to = c + row * c_pitch + column * c_along, d + row * d_pitch + column * u64(itemsize)
            store(found, mine, theirs, from_c, c_along, to, left)

    return Source(kernel, types.void(*[u64] * 12), THREADS, blocks)


def adder(adds: bool, add: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``(x, c)``: x plus the number at address ``c``, by ``add(x, c)``; x itself if there is no C."""
    return inlined(lambda x, c: add(x, c) if adds else x)


@inlined
def add_double(x, c):
    """Return a number plus that at an address."""
    return read_double(c) + x


def reconstruct(by_integers: bool, adds: bool) -> Source:
    """Return the kernel ``D = C + x * row factor * column factor``; D may be C.

    ``by_integers`` is for GPUs with few float64 units; bits are the same.
    """
    number, plus = integer, adder(adds, add_double)

    def store(s, mine, theirs, c, c_along, d, left):
        mine = load_factor(mine)
        x0 = plus(number(s[0], s[1], s[2]) * (mine * load_factor(theirs)), c)
        if left == i32(COLUMNS):
            x1 = number(s[3], s[4], s[5]) * (mine * load_factor(theirs + u64(8)))
            x2 = number(s[6], s[7], s[8]) * (mine * load_factor(theirs + u64(16)))
            x3 = number(s[9], s[10], s[11]) * (mine * load_factor(theirs + u64(24)))
            store_pair(d, x0, plus(x1, c + c_along))
            x2 = plus(x2, c + u64(2) * c_along)
            store_pair(d + u64(16), x2, plus(x3, c + u64(3) * c_along))
        else:
            store_double(d, x0)
            if left > i32(1):
                x1 = number(s[3], s[4], s[5]) * (mine * load_factor(theirs + u64(8)))
                store_double(d + u64(8), plus(x1, c + c_along))
            if left > i32(2):
                x2 = number(s[6], s[7], s[8]) * (mine * load_factor(theirs + u64(16)))
                store_double(d + u64(16), plus(x2, c + u64(2) * c_along))

    return of_fours(_sums_of_four(by_integers), inlined(store), 8, blocks=3)

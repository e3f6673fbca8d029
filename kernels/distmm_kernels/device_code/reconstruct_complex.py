"""Compute complex128 numbers from the residues of three products, and add them to C.

With A = X + iY and B = U + iV, the products are XU, YV and (X + Y)(U + V): the real part is the first minus the second.
The imaginary part is the third minus both. Residues are subtracted modulo their modulus, which is exact.

With the conjugate of B, the products are YU, XV and (X + Y)(U + V), and the parts change places: the imaginary part is
the first minus the second, and the real part is the third minus both. So B's own residues serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code import reconstruct as reals
from distmm_kernels.device_code.emit import I32, f64, i32, inlined, intrinsic, types, u32, u64
from distmm_kernels.emulation.moduli import MODULI, OFFSET, UNITS, WEIGHTS
from distmm_kernels.emulation.residues import COLUMNS, FORMS
from distmm_kernels.launch.compiler import Source

WORDS = FORMS[2] * len(MODULI)
SHIFT = 24


def remainder_multiplier(modulus: int) -> int:
    """Return M, such that ``v M // 2^24`` is ``v // modulus`` for all v below 2^10; ``v M`` is below 2^32."""
    return -(-(1 << SHIFT) // modulus)


def _load(builder, address, step):
    return reals.words_of(builder, address, step, WORDS)


words_of_four = intrinsic(_load, (u64, u64), (u32,) * WORDS)
"""words_of_four(address, step): residues of four neighbours, product by product and modulus by modulus."""


def _sums_of(column: int, by_integers: bool, conjugated: bool) -> Callable[..., Any]:
    """Make ``(words)``: three exact sums for the real part of one column, and three for the imaginary part."""

    def write(builder, words):
        def byte(index):
            return reals.byte_of(builder, builder.extract_value(words, index), column)

        def remainder(value, modulus):
            quotient = builder.lshr(builder.mul(value, I32(remainder_multiplier(modulus))), I32(SHIFT))
            return builder.sub(value, builder.mul(quotient, I32(modulus)))

        sums = [reals.first_sums(by_integers)] * 2
        for index, (modulus, weight) in enumerate(zip(MODULI, WEIGHTS, strict=True)):
            first, second, third = (byte(form * len(MODULI) + index) for form in range(FORMS[2]))
            # each byte is its residue plus OFFSET, and so must be the results; multiples of the modulus keep them
            # positive
            minus = builder.add(builder.sub(first, second), I32(OFFSET + modulus))
            both = builder.add(first, second)
            rest = builder.add(builder.sub(third, both), I32(2 * OFFSET + 2 * modulus))
            sums = [
                reals.add_weighted(builder, part, remainder(value, modulus), weight, by_integers)
                for part, value in zip(sums, (minus, rest), strict=True)
            ]
        real, imaginary = sums[::-1] if conjugated else sums
        return [total for part in (real, imaginary) for total in reals.converted(builder, part, by_integers)]

    return intrinsic(write, (types.UniTuple(u32, WORDS),), (f64,) * (2 * len(UNITS)))


def reconstruct(by_integers: bool, adds: bool, conjugated: bool = False) -> Source:
    """Return the kernel ``D = C + z * row factor * column factor``; D may be C.

    ``by_integers`` is as in `distmm_kernels.device_code.reconstruct.reconstruct`, but residues have the shape
    ``(products, moduli, rows, columns)``. The products are those with the conjugate of B if ``conjugated``.
    """
    plus = reals.adder(adds, reals.add_double)
    first, second, third, fourth = (_sums_of(column, by_integers, conjugated) for column in range(COLUMNS))

    def stored(s, factor, c, d):
        real, imaginary = reals.integer(s[0], s[1], s[2]) * factor, reals.integer(s[3], s[4], s[5]) * factor
        reals.store_pair(d, plus(real, c), plus(imaginary, c + u64(8)))

    put = inlined(stored)

    def store(words, mine, theirs, c, c_along, d, left):
        mine = reals.load_factor(mine)
        put(first(words), mine * reals.load_factor(theirs), c, d)
        if left > i32(1):
            put(second(words), mine * reals.load_factor(theirs + u64(8)), c + c_along, d + u64(16))
        if left > i32(2):
            put(third(words), mine * reals.load_factor(theirs + u64(16)), c + u64(2) * c_along, d + u64(32))
        if left > i32(3):
            put(fourth(words), mine * reals.load_factor(theirs + u64(24)), c + u64(3) * c_along, d + u64(48))

    # with three blocks on a multiprocessor, each thread would spill 40 bytes of registers
    return reals.of_fours(words_of_four, inlined(store), 16, blocks=2)

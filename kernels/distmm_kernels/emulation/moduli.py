"""Sixteen moduli for float64 products by residues, and the weights that make a number of its residues; exact integers.

Residues modulo numbers without common factors determine a product of integer matrices, as long as its elements are
smaller than half of the moduli's product P (Chinese remainder theorem). Modulo a number of 8 bits it is a product of
int8 matrices, which tensor cores compute exactly (Ozaki scheme II: Ozaki, Uchino, Imamura, arXiv 2504.08009).

Sixteen moduli leave 62 bits for a row of A and a column of B: elements of N(0, 1) keep their 53 bits for any k up to
`distmm_kernels.emulation.formats.GRANULE`. With fifteen, matrices skewed along k by 2^4 would have a larger error than
a chain of float64 multiply-adds has.
"""

from __future__ import annotations

import math

__all__ = [
    "LIMIT",
    "MODULI",
    "OFFSET",
    "PRODUCT",
    "UNITS",
    "WEIGHTS",
    "byte_weights",
    "digits",
    "epilogue_multiplier",
    "multiplier",
    "start",
    "weight",
]

MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
PRODUCT = math.prod(MODULI)

# A residue of x is ``(x + OFFSET) mod modulus - OFFSET``: from -128 to 127 at most, an int8.
OFFSET = 128

# The product of the squared norms of a row and a column, both integers, stays below this squared: then their inner
# product is less than P / 2 by Cauchy-Schwarz, and by enough that no rounding of quotients matters.
LIMIT = float(PRODUCT // 2 - (PRODUCT >> 20))

UNITS = (84, 42, 0)  # exponents of the units that weights are split into


def digits(number: int) -> tuple[int, ...]:
    """Split an integer into multiples of 2^84, 2^42 and 1: ``number = d0 2^84 + d1 2^42 + d2``, each below 2^42.

    Sums of sixteen of them times residues are integers below 2^53 in their unit: exact in float64 in any order.
    """
    found = []
    for exponent in UNITS:
        digit = (number + (1 << exponent >> 1)) >> exponent
        found.append(digit)
        number -= digit << exponent
    return tuple(found)


def weight(modulus: int, product: int) -> int:
    """Return the number between -P/2 and P/2 whose residue is 1 modulo one modulus of P and 0 modulo all others."""
    others = product // modulus
    found = others * pow(others, -1, modulus)
    return (found + product // 2) % product - product // 2


WEIGHTS = tuple(weight(modulus, PRODUCT) for modulus in MODULI)


def byte_weights(modulus: int) -> tuple[int, ...]:
    """Return 2^0, 2^8, ... 2^56 modulo a number, as near 0 as they can be: int8."""
    half = (modulus - 1) // 2
    return tuple((pow(2, 8 * i, modulus) + half) % modulus - half for i in range(8))


def start(modulus: int) -> int:
    """Return the number that the weighted sum of the bytes of ``x + 2^63`` starts from, so that no sum is negative.

    Modulo the number, the sum is then ``x + OFFSET``; it is below 2^19.
    """
    least = 255 * 128 * 8
    return least + (OFFSET - 2**63 - least) % modulus


def multiplier(modulus: int) -> int:
    """Return M, such that ``v M // 2^32`` is ``v // modulus`` for all v below 2^19."""
    return -(-(2**32) // modulus)


def epilogue_multiplier(modulus: int) -> int:
    """Return M, such that ``v M // 2^39`` is ``v // modulus`` for all v below 2^29; M is below 2^32."""
    return -(-(2**39) // modulus)

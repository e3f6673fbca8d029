"""Fifteen moduli for float64 products by residues, and the weights to compute a number from its residues. All exact.

The moduli are pairwise coprime, and P is their product. An integer smaller than P/2 in magnitude is determined by its
residues (Chinese remainder theorem). The moduli are 256 at most, so residues fit in int8. A product of integer matrices
modulo one of them is a product of int8 matrices, which tensor cores compute exactly (Ozaki scheme II: Ozaki, Uchino,
Imamura, arXiv 2504.08009).

With fifteen moduli, a row of A and a column of B may each have a norm of 58 bits. Then a typical element of N(0, 1)
keeps 52 bits in a granule of 8192 steps, and more in shorter ones. Products have a fifteenth of the error of a chain of
float64 multiply-adds there. With fourteen moduli their error would be that of the chain.
"""

from __future__ import annotations

import math

MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197)
PRODUCT = math.prod(MODULI)

# A residue of x is ``(x + OFFSET) mod modulus - OFFSET``: from -128 to 127 at most, an int8.
OFFSET = 128

# Bound of the norm of a row times the norm of a column, both of integers. By Cauchy-Schwarz their inner product is then
# less than P / 2. The margin is large enough for the rounding of quotients.
LIMIT = float(PRODUCT // 2 - (PRODUCT >> 20))

UNITS = (84, 42, 0)  # weights are split into multiples of 2 to these powers


def digits(number: int) -> tuple[int, ...]:
    """Split an integer into multiples of 2^84, 2^42 and 1: ``number = d0 2^84 + d1 2^42 + d2``, each below 2^42.

    A sum of fifteen digits times residues is an integer below 2^53. So float64 adds them exactly in any order.
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
    """Return 2^0, 2^8, ... 2^56 modulo a number, each as the residue nearest 0, which fits in int8."""
    half = (modulus - 1) // 2
    return tuple((pow(2, 8 * i, modulus) + half) % modulus - half for i in range(8))


def start(modulus: int) -> int:
    """Return the initial value of the weighted sum of the bytes of ``x + 2^63``. With it no sum is negative.

    The sum is then ``x + OFFSET`` modulo ``modulus``, and is below 2^19.
    """
    least = 255 * 128 * 8
    return least + (OFFSET - 2**63 - least) % modulus


def multiplier(modulus: int) -> int:
    """Return M, such that ``v M // 2^32`` is ``v // modulus`` for all v below 2^19."""
    return -(-(2**32) // modulus)


def epilogue_multiplier(modulus: int) -> int:
    """Return M, such that ``v M // 2^39`` is ``v // modulus`` for all v below 2^29; M is below 2^32."""
    return -(-(2**39) // modulus)

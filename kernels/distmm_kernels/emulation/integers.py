"""int32 and int64 operands as residues: their moduli, their weights, and the launches that compute residues.

An inner product of integers of b bits over a granule of k is at most ``2^(2 b - 2) * GRANULE`` in magnitude. Its
residues determine it if the product P of the moduli is more than twice this bound. The result is the weighted sum of
the residues minus a multiple of P. Only its value modulo 2^b is needed. So the arithmetic may wrap around, and the
result is exact for all operands.

The multiple of P is computed from the residues too: it is the sum of each residue times its weight divided by P,
rounded to an integer. These quotients, the *shares*, are rounded to 2^-20. This changes the sum by 0.0012 at most. The
product is less than 0.37 P, so the sum still rounds to the right integer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from distmm_kernels.device import Device
from distmm_kernels.emulation.launches import Plan
from distmm_kernels.emulation.moduli import MODULI, OFFSET, weight
from distmm_kernels.emulation.residues import ROWS, STRETCH, Layout, Residues, reads_along_k
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.driver import loaded
from distmm_kernels.layout.stack import Array, Stack

# Products with fewer steps are multiplied as they are: the residues of C take as long as the product.
SHORTEST = 512

SHIFT = 20  # shares are stored as multiples of 2^-20; their sums stay below 2^31


class System(NamedTuple):
    """Moduli for integers of one width, and the constants with which an integer is computed from its residues.

    The sums use unsigned bytes: each residue plus `OFFSET`.

    Attributes
    ----------
    bits
        Bits of an integer of the operands and of the result.
    product
        The moduli's product, P.
    weights
        The weight of each modulus, modulo 2^bits. The byte of the modulus is multiplied by it.
    start
        The initial value of the weighted sum, modulo 2^bits. It cancels the `OFFSET` of the bytes.
    shares
        Each weight divided by P, in units of 2^-20.
    shares_start
        The initial value of the sum of bytes times shares. It cancels `OFFSET` and adds 1/2. The integer part of the
        sum is then the multiple of P.
    """

    bits: int
    moduli: tuple[int, ...]
    product: int
    weights: tuple[int, ...]
    start: int
    shares: tuple[int, ...]
    shares_start: int

    @classmethod
    def of(cls, bits: int, moduli: tuple[int, ...]) -> System:
        """Compute the constants."""
        product = math.prod(moduli)
        whole = [weight(modulus, product) for modulus in moduli]
        weights = tuple(each % (1 << bits) for each in whole)
        shares = tuple(((each << SHIFT + 1) + product) // (2 * product) for each in whole)
        start, shares_start = -OFFSET * sum(weights) % (1 << bits), (1 << SHIFT - 1) - OFFSET * sum(shares)
        return cls(bits, moduli, product, weights, start, shares, shares_start)


SYSTEMS = {32: System.of(32, MODULI[:10]), 64: System.of(64, (*MODULI, 193, 191, 181))}


def split_integers(stack: Array, bits: int, device: Device) -> Residues:
    """Enqueue the kernel that splits matrices ``(batch, rows, k)`` or one matrix ``(rows, k)``, with any strides.

    The matrices are read in place. The device must be current.
    """
    address, (batch, rows, k), strides, _ = Stack.of(stack)
    at = Layout.of(batch, rows, k, moduli=len(SYSTEMS[bits].moduli), scaled=False)
    numbers = *strides, rows, k, at.granule_step, at.last_ld
    if 0 in (batch, rows, k):
        return Residues(at, Plan(at, (), ()).enqueue(0, 0))
    parameters = bits, reads_along_k((batch, rows, k), strides)
    kernel = loaded(Recipe("distmm_kernels.device_code.integer_residues:split", parameters), device)
    grid = -(-rows // ROWS) * -(-k // STRETCH), 1
    return Residues(at, Plan(at, ((kernel, grid),), numbers).enqueue(batch, address))

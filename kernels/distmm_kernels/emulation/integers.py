"""int32 and int64 operands as residues: how many moduli they need, their weights, and the kernels that make residues.

A product of integers of b bits, summed over a granule of k, is smaller than ``2^(2 b - 2) * GRANULE``. As many moduli
as make P more than twice that determine it. It is wanted modulo 2^b only: so the weighted sum of residues, less a
multiple of P, may wrap around, and is exact for all operands.

The multiple of P is a sum of residues too, each times its weight's share of P. Shares are rounded to 2^-20, which
makes that sum wrong by 0.0012 at most, and the product is less than 0.37 P: so the nearest integer is the right one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from distmm_kernels.device import Device
from distmm_kernels.emulation.moduli import MODULI, OFFSET, weight
from distmm_kernels.emulation.residues import ROWS, STRETCH, Layout, Residues
from distmm_kernels.emulation.splits import MAX_GRID_Z
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.driver import loaded
from distmm_kernels.layout.stack import Stack

__all__ = ["SHIFT", "SYSTEMS", "IntegerSplitter", "System", "integer_splitter"]

Array = Any  # cupy.ndarray: CuPy ships no types

SHIFT = 20  # shares are multiples of 2^-20, whose sums stay below 2^31


@dataclass(frozen=True)
class System:
    """Moduli for integers of one width, and what makes an integer of residues modulo them.

    Residues are taken as unsigned bytes, `OFFSET` more than they are.

    Attributes
    ----------
    bits
        Of operands and results.
    """

    bits: int
    moduli: tuple[int, ...]

    @functools.cached_property
    def product(self) -> int:
        """The moduli's product, P."""
        return math.prod(self.moduli)

    @functools.cached_property
    def weights(self) -> tuple[int, ...]:
        """What each byte is multiplied by, modulo 2^bits."""
        return tuple(self._wrapped(weight(modulus, self.product)) for modulus in self.moduli)

    @functools.cached_property
    def start(self) -> int:
        """What the sum of weighted bytes starts from, modulo 2^bits."""
        return self._wrapped(-OFFSET * sum(self.weights))

    @functools.cached_property
    def shares(self) -> tuple[int, ...]:
        """Each weight over P, in units of 2^-20."""
        return tuple(
            ((weight(modulus, self.product) << SHIFT + 1) + self.product) // (2 * self.product)
            for modulus in self.moduli
        )

    @functools.cached_property
    def shares_start(self) -> int:
        """What the sum of bytes times shares starts from: its integer part is then the multiple of P."""
        return (1 << SHIFT - 1) - OFFSET * sum(self.shares)

    def _wrapped(self, number: int) -> int:
        return number % (1 << self.bits)


SYSTEMS = {32: System(32, MODULI[:10]), 64: System(64, (*MODULI, 191, 181))}


class IntegerSplitter:
    """Splits operands of one type into residues on one device."""

    def __init__(self, device: Device, bits: int) -> None:
        self.device, self.bits = device, bits

    def __call__(self, stack: Array) -> Residues:
        """Enqueue the splitting of matrices ``(batch, rows, k)``, or of one, with any strides, read in place.

        The device must be current.
        """
        import cupy

        address, (batch, rows, k), (between, pitch, along), _ = Stack.of(stack)
        at = Layout.of(batch, rows, k, moduli=len(SYSTEMS[self.bits].moduli), scaled=False)
        memory = cupy.cuda.alloc(at.end)
        if 0 not in (batch, rows, k):
            # a warp reads 32 neighbours, along k or along rows
            along_k = k == 1 or rows == 1 or abs(along) <= abs(pitch)
            maker = "distmm_kernels.device_code.integer_residues:split"
            kernel = loaded(Recipe(maker, (self.bits, along_k)), self.device)
            blocks = -(-rows // ROWS) * -(-k // STRETCH)
            for first in range(0, batch, MAX_GRID_Z):
                numbers = between, pitch, along, rows, k, at.granule_step, at.last_ld, first
                grid = blocks, 1, min(batch - first, MAX_GRID_Z)
                kernel.launch(grid, (), (address, memory.ptr, *numbers))
        return Residues(at, memory)


@functools.cache
def integer_splitter(device: Device, bits: int) -> IntegerSplitter:
    """Return the one splitter of a type on a device."""
    return IntegerSplitter(device, bits)

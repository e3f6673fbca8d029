"""Products that multiply each granule of k in a fast way, or in an accurate one where a guard of it is raised.

A granule's way depends on its own numbers only, so that cuts of k at granules leave the bits of the result as they are.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.emulation.splits import Found
from distmm_kernels.gemm.aligned import AlignedKernel
from distmm_kernels.kernel import Array
from distmm_kernels.select import select

__all__ = ["GuardedKernel", "GuardedOperand", "Way"]


class Way(enum.Enum):
    """How a granule is multiplied."""

    RESIDUES = enum.auto()
    FP16X3 = enum.auto()
    TF32X3 = enum.auto()
    IEEE = enum.auto()


@dataclass(frozen=True, eq=False, kw_only=True)
class GuardedOperand:
    """A prepared operand.

    Attributes
    ----------
    shape
        ``(*batch, m, k)`` or ``(*batch, k, n)``.
    matrices
        The operand itself, ``(*batch, rows, k)``: A, or B transposed. Kept for granules that take another way.
    found
        What the guards of its granules found.
    """

    shape: tuple[int, ...]
    matrices: Array
    found: Found

    def granule(self, index: int) -> Array:
        """Return one granule of the operand itself."""
        return self.matrices[..., index * GRANULE : (index + 1) * GRANULE]


class GuardedKernel(AlignedKernel):
    """A subclass says which way it expects, which one a guarded granule takes, and how granules are added."""

    granule = GRANULE

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        # one kernel for blocks of any size: the bits of all such kernels agree, but for the sign of a zero
        self._ieee = select(problem, device, "ieee", reproducible=True)

    @abstractmethod
    def _expected(self, k: int) -> tuple[Way, ...]:
        """Return the ways of an operand's granules where no guard is raised."""

    @abstractmethod
    def _way(self, a: Any, b: Any, index: int) -> Way:
        """Choose for one granule, from its guards."""

    @abstractmethod
    def _chain(self, ways: tuple[Way, ...], a: Any, b: Any, c: Array | None, d: Array) -> None:
        """Add granule after granule: the first to C, each other one to D."""

    def _accumulate(self, a: Any, b: Any, c: Array | None, d: Array) -> None:
        expected = self._expected(a.shape[-1])
        # The guards may not have arrived yet. Do not wait: begin the product that they nearly always allow. If one is
        # raised after all, compute D again from C, which is unchanged.
        begun = not (a.found.here and b.found.here)
        if begun:
            self._chain(expected, a, b, c, d)
        ways = expected
        if a.found.raised or b.found.raised:
            ways = tuple(way if way is Way.IEEE else self._way(a, b, i) for i, way in enumerate(expected))
        if not begun or ways != expected:
            self._chain(ways, a, b, c, d)

    def _by_multiply_adds(self, index: int, a: GuardedOperand, b: GuardedOperand, c: Array | None, d: Array) -> None:
        """Add one granule by a chain of multiply-adds in the operands' own type."""
        self._ieee._accumulate(a.granule(index), b.granule(index).swapaxes(-1, -2), c, d)

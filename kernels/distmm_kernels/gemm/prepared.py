"""Operands in a kernel's own format, which `prepare_a` and `prepare_b` return in place of arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """A prepared operand.

    Attributes
    ----------
    shape
        ``(*batch, m, k)`` or ``(*batch, k, n)``.
    format
        What tensor cores read, in a few words. A kernel takes operands of the formats that it ``reads``.
    made
        What has the numbers: an array, parts, residues, or an operand of another kernel. Broadcast matrices are kept
        once.
    batch
        Of parts and residues, the batch dimensions of the matrices that they have.
    """

    shape: tuple[int, ...]
    format: str
    made: Any
    batch: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self.made.nbytes)

    @property
    def transposed(self) -> Self:
        """A left operand's transpose as a right operand, in the same memory."""
        return replace(self, shape=(*self.shape[:-2], self.shape[-1], self.shape[-2]))

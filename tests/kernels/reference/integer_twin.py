"""A NumPy model of the kernel ``integer_residues``, with the same bits: int32 and int64 products by residues."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.emulation.integers import SHIFT, SYSTEMS
from distmm_kernels.emulation.moduli import OFFSET

__all__ = ["product", "reconstruct", "split"]


def split(x: NDArray[Any]) -> NDArray[np.int8]:
    """Return the residues ``(moduli, rows, k)`` of int32 or int64 numbers ``(rows, k)``."""
    moduli = SYSTEMS[8 * x.itemsize].moduli
    # take the remainder before adding the offset: the sum could exceed int64
    return np.stack([((x.astype(np.int64) % p + OFFSET) % p - OFFSET).astype(np.int8) for p in moduli])


def reconstruct(residues: NDArray[np.int8], bits: int) -> NDArray[Any]:
    """Return the integers, modulo 2^bits, that have these residues ``(moduli, ...)``."""
    system = SYSTEMS[bits]
    number = np.dtype(f"uint{bits}").type
    total = np.full(residues.shape[1:], system.start, number)
    multiple = np.full(residues.shape[1:], np.int32(system.shares_start))
    for residue, weight, share in zip(residues, system.weights, system.shares, strict=True):
        byte = residue.astype(np.int32) + np.int32(OFFSET)
        total += byte.astype(number) * number(weight)
        multiple += byte * np.int32(share)
    multiple >>= np.int32(SHIFT)
    # an array, since NumPy warns if a scalar wraps around
    total -= multiple.astype(number) * np.array([system.product % (1 << bits)], number)
    return total.astype(f"int{bits}")


def product(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return ``c + a @ b``, ``(m, k) @ (k, n)``, of int32 or int64."""
    bits = 8 * a.itemsize
    moduli = np.array(SYSTEMS[bits].moduli)[:, None, None]
    d = np.zeros((a.shape[0], b.shape[1]), a.dtype) if c is None else c
    for first in range(0, a.shape[1], GRANULE):
        x, y = split(a[:, first : first + GRANULE]), split(np.ascontiguousarray(b[first : first + GRANULE].T))
        # the sums of int8 products are exact in float64, so BLAS computes them
        sums = np.matmul(x.astype(np.float64), y.astype(np.float64).swapaxes(1, 2)).astype(np.int64)
        d = d + reconstruct(((sums + OFFSET) % moduli - OFFSET).astype(np.int8), bits)
    return d

"""NumPy models of complex128 products by residues, with the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmm_kernels.emulation.formats import GRANULE, Guard
from distmm_kernels.emulation.moduli import MODULI, OFFSET
from distmm_kernels.layout.real_view import as_real
from tests.kernels.reference.residue_twin import Float64, reconstruct, scaled

__all__ = ["product", "reconstructed", "split"]

Complex128 = NDArray[np.complex128]


def split(x: Complex128) -> tuple[NDArray[np.int8], Float64, Guard]:
    """Return the residues ``(forms, moduli, rows, k)`` of a granule, the factors of its rows, and the guard.

    The forms are re, im and re + im.
    """
    integers, factor, guard = scaled(as_real(np.ascontiguousarray(x)))
    real, imaginary = integers[:, ::2], integers[:, 1::2]
    forms = [_residues(form) for form in (real, imaginary, real + imaginary)]
    return np.stack(forms), factor, guard


def _residues(integers: NDArray[np.int64]) -> NDArray[np.int8]:
    return np.stack([((integers % p + OFFSET) % p - OFFSET).astype(np.int8) for p in MODULI])


def reconstructed(sums: NDArray[Any], factor: Float64, conjugated: bool = False) -> Complex128:
    """Return the complex numbers that the products ``(forms, moduli, m, n)`` make, times their factors.

    If ``conjugated``, the products are those with the conjugate of B.
    """
    moduli = np.array(MODULI)[:, None, None]
    minus, rest = (
        reconstruct((part + OFFSET) % moduli - OFFSET) for part in (sums[0] - sums[1], sums[2] - sums[0] - sums[1])
    )
    made = np.empty(factor.shape, np.complex128)
    real, imaginary = (rest, minus) if conjugated else (minus, rest)
    made.real, made.imag = real * factor, imaginary * factor
    return made


def product(a: Complex128, b: Complex128, c: Complex128 | None = None) -> tuple[Complex128, Guard]:
    """Return ``c + a @ b`` as the kernel computes it if no guard is raised, and the guards.

    Here short granules are computed by residues, too.
    """
    d, found = c, Guard(0)
    for first in range(0, a.shape[1], GRANULE):
        x, rows, one = split(a[:, first : first + GRANULE])
        y, columns, other = split(b[first : first + GRANULE].T)
        found |= one | other
        # the sums of int8 products are exact in float64, so BLAS computes them
        sums = np.matmul(x.astype(np.float64), y.astype(np.float64).swapaxes(-1, -2)).astype(np.int64)
        added = reconstructed(sums, rows[:, None] * columns)
        d = added if d is None else d + added
    return np.zeros((a.shape[0], b.shape[1]), np.complex128) if d is None else d, found

"""Symmetric products ``A @ A.T`` and Hermitian ones ``A @ A.conj().T``: mirror images of what lies below the diagonal.

Kernels need not add the terms of both halves of a product in the same way, so the bits of a full product would differ.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

Symmetry: TypeAlias = Literal["symmetric", "hermitian"]

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy ships no types

# Edge of the tiles on the diagonal whose upper half is chosen element by element, with a mask; the rest is copied.
DIAGONAL_TILE = 256


def turned(block: Array, symmetry: Symmetry) -> Array:
    """Return the transpose ``(*batch, n, m)`` of an array, as a view, or its conjugate transpose."""
    other = block.swapaxes(-1, -2)
    return other.conj() if symmetry == "hermitian" else other


def mirror(d: Array, symmetry: Symmetry) -> None:
    """Overwrite the upper half of a NumPy array ``(*batch, m, m)`` by its lower half.

    The diagonal of a Hermitian product is real, but rounding may leave imaginary parts: they are set to 0, as BLAS's
    HERK does.
    """
    # real numbers as words of their size: NumPy need not know how to choose between bfloat16 values
    d, size = d if d.dtype.kind == "c" else d.view(f"u{d.itemsize}"), d.shape[-1]
    if size > DIAGONAL_TILE:
        half = size // 2
        d[..., :half, half:] = turned(d[..., half:, :half], symmetry)
        mirror(d[..., :half, :half], symmetry)
        mirror(d[..., half:, half:], symmetry)
        return
    below = np.tri(size, k=-1, dtype=bool)
    diagonal = d.real if symmetry == "hermitian" else d
    d[...] = np.where(below, d, np.where(below.T, turned(d, symmetry), diagonal))

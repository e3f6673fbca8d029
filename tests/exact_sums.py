"""Matrices whose products have the same bits by any BLAS: for tests that compare bits.

A BLAS promises no bits. They differ between processors, numbers of threads and sizes of blocks. The elements here are
whole numbers from -8 to 8, and each panel of A is multiplied by another power of two. The sum over one panel is exact,
in whatever order a BLAS adds it. Sums over several panels are rounded. So the bits of C follow from the order in which
the panels are added, which is what distmm promises, and from nothing else.
"""

from __future__ import annotations

import itertools

import numpy as np

__all__ = ["in_panels", "whole_numbers"]

# Exponents of the panels' powers of two: far enough apart that sums over panels need more digits than the type has.
SPREAD = {"f2": 0, "f4": 12, "f8": 30, "c8": 12, "c16": 30}


def whole_numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Draw whole numbers from -8 to 8; for complex types both parts."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 9, shape)
    return (x + 1j * rng.integers(-8, 9, shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def in_panels(a: np.ndarray, depth: int, *, squared: bool = False) -> np.ndarray:
    """Multiply each panel of A ``(..., m, k)``, `depth` columns of it, by another power of two.

    With `squared` A is multiplied by its own transpose, so that each power counts twice.
    """
    spread = SPREAD.get(a.dtype.str[1:], 0) // (2 if squared else 1)
    out = a.copy()
    for first, exponent in zip(range(0, a.shape[-1], depth), itertools.cycle((spread, -spread, 0))):
        out[..., first : first + depth] *= a.dtype.type(2.0**exponent)
    return out

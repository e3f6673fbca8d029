"""Small products of NumPy arrays that float64 holds exactly, with NumPy's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import distmm

N = 48


def whole(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 9, shape).astype("f8")


A, B = whole(N, N), whole(N, N, seed=1)
Z = A + 1j * B
FROZEN = A.copy()
FROZEN.flags.writeable = False

PRODUCTS: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "matmul": (lambda **how: distmm.matmul(A, B, **how), A @ B),
    "stack": (lambda **how: distmm.matmul(A, np.stack([B, B.T]), **how), A @ np.stack([B, B.T])),
    "gemm": (lambda **how: distmm.gemm(2, A, B, 3, A, transa=True, transb=True, **how), 2 * A.T @ B.T + 3 * A),
    "gram": (lambda **how: distmm.gram(Z, **how), Z @ Z.conj().T),
    "gram of the transpose": (lambda **how: distmm.gram(Z, trans=True, beta=2, C=A + A.T, **how),
                              Z.conj().T @ Z + 2 * (A + A.T)),
    "Fortran, read-only": (lambda **how: distmm.matmul(np.asfortranarray(A), FROZEN, **how), A @ A),
    "gaps": (lambda **how: distmm.matmul(A[::2, ::3], B[::-3], **how), A[::2, ::3] @ B[::-3]),
    "byte order": (lambda **how: distmm.matmul(A.astype(">f8"), B, **how), A @ B),
    "integers": (lambda **how: distmm.matmul(A.astype("i2"), B.astype("u1"), **how),
                 A.astype("i2") @ B.astype("u1")),
    "no k": (lambda **how: distmm.matmul(A[:, :0], B[:0], **how), np.zeros((N, N))),
    "no rows": (lambda **how: distmm.matmul(A[:0], B, **how), np.zeros((0, N))),
    "vectors": (lambda **how: distmm.matmul(A, B[0], **how), A @ B[0]),
}  # fmt: skip

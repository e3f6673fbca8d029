"""Matrices for symmetric products, and what NumPy makes of them."""

from __future__ import annotations

import numpy as np


def sample(shape: tuple[int, ...], dtype: str = "f8", seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape) * 20
    if np.dtype(dtype).kind == "c":
        return (x + 1j * x[..., ::-1, :]).astype(dtype)
    return x.astype("i8" if np.dtype(dtype).kind in "iub" else "f8").astype(dtype)


def truth(a: np.ndarray, trans: bool = False, hermitian: bool = True) -> np.ndarray:
    turned = np.swapaxes(a.conj() if hermitian else a, -1, -2)
    return turned @ a if trans else a @ turned


def mirrored(c: np.ndarray, hermitian: bool = True) -> np.ndarray:
    turned = np.swapaxes(c, -1, -2)
    return turned.conj() if hermitian and c.dtype.kind == "c" else turned

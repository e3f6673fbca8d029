"""Small matrices of every type that files hold."""

from __future__ import annotations

import numpy as np

DTYPES = ["float16", "float32", "float64", "int8", "int64", "uint16", "complex64", "complex128", "bool", ">f8"]


def sample(shape: tuple[int, int] = (13, 9), dtype: str = "float64") -> np.ndarray:
    rng = np.random.default_rng(5)
    values = rng.integers(0, 100, shape) + (1j * rng.integers(0, 100, shape) if dtype.startswith("complex") else 0)
    return values.astype(dtype)

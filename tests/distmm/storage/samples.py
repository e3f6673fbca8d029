"""Small matrices of every type that files hold, and files of every format."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import zarr

DTYPES = ["float16", "float32", "float64", "int8", "int64", "uint16", "complex64", "complex128", "bool", ">f8"]


def sample(shape: tuple[int, int] = (13, 9), dtype: str = "float64") -> np.ndarray:
    rng = np.random.default_rng(5)
    values = rng.integers(0, 100, shape) + (1j * rng.integers(0, 100, shape) if dtype.startswith("complex") else 0)
    return values.astype(dtype)


def save_matrix(path: Path, values: np.ndarray, chunks: tuple[int, int] = (32, 24)) -> Path:
    """Write a matrix in the format of its suffix."""
    if path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["values"] = values
    else:
        zarr.create_array(path, data=values, chunks=chunks)
    return path

"""Small matrices of every type, and files of every format, for the tests of storage."""

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


def stored(form: str, folder: Path, values: np.ndarray) -> str:
    """Write values with the library of their format; return the path to open."""
    name = str(folder / f"A-{form}")
    if form in ("npy-c", "npy-f"):
        np.save(f"{name}.npy", np.asarray(values, order="C" if form == "npy-c" else "F"))
        return f"{name}.npy"
    if form == "hdf5":
        with h5py.File(f"{name}.h5", "w") as file:
            file["group/A"] = values
        return f"{name}.h5:/group/A"
    if form == "group":
        zarr.open_group(f"{name}.zarr", mode="w").create_array("A", data=values, chunks=(4, 4))
        return f"{name}.zarr/A"
    packed = {"compressors": None} if form.startswith("plain") else {}
    zarr.create_array(f"{name}.zarr", data=values, chunks=(4, 4), zarr_format=2 if form.endswith("2") else 3, **packed)
    return f"{name}.zarr"


FORMS = ["npy-c", "npy-f", "zarr2", "zarr3", "plain2", "plain3", "group", "hdf5"]

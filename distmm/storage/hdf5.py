"""Datasets in HDF5 files, written ``file.h5`` or ``file.h5:/group/dataset``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.storage.matrix import Matrix, check_dtype, check_shape, only_matrix
from distmm.storage.output import Output, Target

__all__ = ["Hdf5Matrix", "Hdf5Target", "split"]


def split(path: str) -> tuple[str, str | None] | None:
    """Split ``file.h5:/name`` into file and dataset (None where not given); None for a path that is not HDF5."""
    found = re.fullmatch(r"(.*\.(?:h5|hdf5))(?::(.*))?", path, re.IGNORECASE)
    return None if found is None else (found[1], found[2] or None)


def datasets(file: h5py.File) -> dict[str, tuple[int, ...]]:
    """Name and shape of every dataset of a file (an empty shape for a null dataset)."""
    shapes: dict[str, tuple[int, ...]] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            shapes[f"/{name}"] = item.shape or ()

    file.visititems(visit)
    return shapes


def _open(file: str) -> h5py.File:
    # Read-only mounts and some network file systems refuse the lock that HDF5 asks for even when reading.
    return h5py.File(file, "r", locking="best-effort")


@dataclass(frozen=True)
class Hdf5Matrix(Matrix):
    """One dataset of an HDF5 file; ``path`` names the file and the dataset."""

    file: str = field(kw_only=True)
    dataset: str = field(kw_only=True)

    @classmethod
    def open(cls, file: str, dataset: str | None) -> Self:
        """Check the dataset; the path inside may be left out where the file holds one matrix only."""
        try:
            with _open(file) as opened:
                shapes = datasets(opened)
                name = dataset or only_matrix(file, shapes, "HDF5 file", ":")
                if name not in opened or not isinstance(opened[name], h5py.Dataset):
                    raise InputError(f"{file}: no dataset {name!r}; it holds {', '.join(shapes) or 'none'}")
                shape, dtype, chunks = opened[name].shape, opened[name].dtype, opened[name].chunks
        except OSError as error:
            raise InputError(f"{file}: not a readable HDF5 file: {error}; copy or write it again") from error
        path = f"{file}:{name}"
        return cls(path, check_shape(path, shape), check_dtype(path, dtype), chunks, file=file, dataset=name)

    def _read(self, rows: slice, cols: slice) -> NDArray[Any]:
        with _open(self.file) as opened:
            return np.asarray(opened[self.dataset][rows, cols], dtype=self.dtype)


@dataclass(frozen=True)
class Hdf5Target(Target):
    """A new HDF5 file with one dataset. HDF5 allows one writing process, so the client writes all blocks."""

    parallel: ClassVar[bool] = False
    dataset: str

    @staticmethod
    def check_replaceable(path: str) -> None:
        """Refuse to delete a file that holds more than one dataset."""
        try:
            with _open(path) as file:
                shapes = datasets(file)
        except OSError as error:
            raise InputError(
                f"{path}: is not an HDF5 file ({error}), and is not replaced; remove it yourself"
            ) from error
        if len(shapes) > 1:
            raise InputError(
                f"{path}: holds {len(shapes)} datasets ({', '.join(shapes)}), and all would be lost; choose another "
                f"file"
            )

    @classmethod
    def create(cls, output: Output, dataset: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> Self:
        """Write the file with its dataset, contiguous, without data."""
        with h5py.File(output.draft, "x") as file:
            file.create_dataset(dataset, shape=shape, dtype=dtype)
        return cls(output, shape, dtype, dataset)

    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        with h5py.File(self.output.draft, "r+") as file:
            file[self.dataset][rows, cols] = block

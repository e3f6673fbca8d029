"""Datasets in HDF5 files, written ``file.h5`` or ``file.h5:/group/dataset``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.storage.flat import FlatTarget
from distmm.storage.matrix import Matrix, check_dtype, check_shape, modified, only_matrix, stamp_of
from distmm.storage.output import Output

__all__ = ["Hdf5Matrix", "check_replaceable", "create", "reopen", "split"]


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

    def fingerprint(self) -> dict[str, Any]:
        """Return size and time of the file too."""
        return {**super().fingerprint(), **modified(self.file)}

    def stamp(self) -> str:
        """Hash what the file system says of the file."""
        return stamp_of([(self.file, os.stat(self.file))])

    def _read(self, rows: slice, cols: slice) -> NDArray[Any]:
        with _open(self.file) as opened:
            return np.asarray(opened[self.dataset][rows, cols], dtype=self.dtype)


def check_replaceable(path: str) -> None:
    """Refuse to delete a file that holds more than one dataset."""
    try:
        with _open(path) as file:
            shapes = datasets(file)
    except OSError as error:
        raise InputError(f"{path}: is not an HDF5 file ({error}), and is not replaced; remove it yourself") from error
    if len(shapes) > 1:
        raise InputError(
            f"{path}: holds {len(shapes)} datasets ({', '.join(shapes)}), and all would be lost; choose another file"
        )


def create(output: Output, dataset: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> FlatTarget:
    """Write a file with one dataset, its space set aside in one piece, without data.

    HDF5 allows one writing process, but such a dataset is plain bytes at an offset, and nothing else in the file
    changes any more: the workers write there as into any file.
    """
    if dtype.kind == "V":
        raise InputError(f"{output.path}: HDF5 files have no type {dtype}; write C to Zarr, or as another type")
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(output.draft, "x") as file:
        file.create_dataset(dataset, shape=shape, dtype=dtype, dcpl=layout)
    return reopen(output)


def reopen(output: Output) -> FlatTarget:
    """Go on with a draft that `create` has made."""
    stored = Hdf5Matrix.open(output.draft, None)
    with _open(output.draft) as file:
        offset = file[stored.dataset].id.get_offset() or 0  # None for a matrix without elements
    return FlatTarget(output, stored.shape, stored.dtype, offset)

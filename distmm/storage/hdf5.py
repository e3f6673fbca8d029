"""Datasets in HDF5 files, written ``file.h5`` or ``file.h5:/group/dataset``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.storage.flat import FlatTarget
from distmm.storage.hdf5_chunks import check_filters, read
from distmm.storage.matrix import FileMatrix, check_dtype, check_shape, only_matrix
from distmm.storage.output import Output
from distmm.storage.regular_files import check_regular

# Largest number of soft links on the way to a dataset. More links are treated as a cycle.
MOST_LINKS = 16


def datasets(file: h5py.File) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every dataset of a file. A null dataset has an empty shape."""
    shapes: dict[str, tuple[int, ...]] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            shapes[f"/{name}"] = item.shape or ()

    file.visititems(visit)
    return shapes


def _open(file: str) -> h5py.File:
    check_regular(file)
    # HDF5 locks files even for reading. Read-only mounts and some network file systems refuse that lock.
    return h5py.File(file, "r", locking="best-effort")


def _dataset(opened: h5py.File, name: str) -> h5py.Dataset | None:
    """Return a dataset whose elements are in this file. None if there is no dataset of this name.

    Links are followed here, one by one. HDF5 itself would open any file of an external link with the user's rights.

    Raises
    ------
    InputError
        For an external link, external storage and a virtual dataset.
    """
    group, ahead = opened["/"], name.split("/")
    found: Any = group
    links = 0
    while ahead:
        part = ahead.pop(0)
        if part in ("", "."):
            continue
        if not isinstance(found, h5py.Group) or (link := found.get(part, getlink=True)) is None:
            return None
        if isinstance(link, h5py.ExternalLink):
            raise InputError(
                f"{opened.filename}:{name}: is a link to {link.path} in another file, {link.filename}, which is not "
                f"followed; give that file and dataset"
            )
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > MOST_LINKS:
                return None
            ahead = link.path.split("/") + ahead
            found = group if link.path.startswith("/") else found
        else:
            found = found[part]
    if not isinstance(found, h5py.Dataset):
        return None
    if found.external or found.is_virtual:
        kind = "external storage" if found.external else "a virtual dataset"
        raise InputError(
            f"{opened.filename}:{name}: is {kind}, whose elements are in other files, which are not read; copy the "
            f"elements into a new dataset, with h5py: file['copy'] = file['{name}'][...]"
        )
    return found


@dataclass(frozen=True)
class Hdf5Matrix(FileMatrix):
    """One dataset of an HDF5 file. ``path`` has the names of the file and the dataset."""

    dataset: str = field(kw_only=True)

    @classmethod
    def open(cls, file: str, dataset: str | None, any_shape: bool = False) -> Self:
        """Open a dataset and check it. `dataset` may be None if the file has only one matrix.

        With `any_shape` it may also be a stack or a vector.

        Raises
        ------
        InputError
            For a missing or damaged dataset, filters that are not supported, and elements in other files.
        """
        try:
            with _open(file) as opened:
                shapes = datasets(opened)
                name = dataset or only_matrix(file, shapes, "HDF5 file", ":")
                found = _dataset(opened, name)
                if found is None:
                    raise InputError(f"{file}: no dataset {name!r}; the file has {', '.join(shapes) or 'none'}")
                check_filters(f"{file}:{name}", found)
                shape, dtype, chunks = found.shape, found.dtype, found.chunks
        except OSError as error:
            raise InputError(f"{file}: not a readable HDF5 file: {error}; copy or write it again") from error
        path = f"{file}:{name}"
        if not any_shape:
            check_shape(path, shape)
        return cls(path, shape, check_dtype(path, dtype), chunks, file=file, dataset=name)

    def _read(self, *region: slice) -> NDArray[Any]:
        with _open(self.file) as opened:
            found = _dataset(opened, self.dataset)
            if found is None:
                raise OSError(f"the dataset {self.dataset} was removed")
            return np.asarray(read(found, region), dtype=self.dtype)


def check_replaceable(path: str, dataset: str | None) -> None:
    """Refuse to replace a file that has other contents than one matrix with the name of the new one."""
    contents: dict[str, bool] = {}  # every name, and whether it is a matrix or a group
    try:
        with _open(path) as file:

            def visit(name: str, link: Any) -> None:
                item = file[name] if isinstance(link, h5py.HardLink) else None
                contents[f"/{name}"] = isinstance(item, h5py.Group) or (
                    isinstance(item, h5py.Dataset) and item.ndim == 2
                )

            file.visititems_links(visit)
            names = list(datasets(file))
    except OSError as error:
        raise InputError(f"{path}: is not an HDF5 file ({error}), and is not replaced; remove it yourself") from error
    is_one = len(names) == 1 and all(contents.values())
    if not is_one or dataset not in (None, names[0]):
        remedy = f"give {path}:{names[0]} to replace it, or choose" if is_one else "choose"
        raise InputError(
            f"{path}: has {', '.join(contents) or 'no matrix'}, and the whole file would be lost; {remedy} another file"
        )


def create(output: Output, dataset: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> FlatTarget:
    """Create a file with one contiguous dataset, whose space is allocated, but without data.

    HDF5 allows only one writing process. A contiguous dataset consists of plain bytes at an offset, and nothing else in
    the file changes. So the workers write these bytes without HDF5.
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
    """Open a draft that `create` has made, to continue writing."""
    stored = Hdf5Matrix.open(output.draft, None)
    with _open(output.draft) as file:
        offset = file[stored.dataset].id.get_offset() or 0  # None for a matrix without elements
    return FlatTarget(output, stored.shape, stored.dtype, offset)

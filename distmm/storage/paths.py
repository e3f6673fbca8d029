"""A user's path of a matrix, as file and dataset. It loads HDF5 only where a file has to be looked at."""

from __future__ import annotations

import os
import re

from distmm.errors import InputError
from distmm.storage.object_store import is_url, located


def raw(path: str) -> tuple[str, str] | None:
    """Split ``file:ROWSxCOLUMNS:TYPE[:F]`` into file and description. None for any other path."""
    found = re.fullmatch(r"(?s)(.+?):(\d+x\d+:[^:]*(?::[CF])?)", path)
    return None if found is None else (found[1], found[2])


def hdf5(path: str) -> tuple[str, str | None] | None:
    """Split ``file.h5:/name`` into file and dataset, which may be None. None for a path that is not HDF5."""
    found = re.fullmatch(r"(.*\.(?:h5|hdf5))(?::(.*))?", path, re.IGNORECASE | re.DOTALL)
    return None if found is None else (found[1], found[2] or None)


def existing_hdf5(path: str) -> tuple[str, str] | None:
    """Split ``file:/name`` where the file is HDF5 under any name, such as ``file.nc``. None for other paths."""
    found = re.fullmatch(r"(.+?):(/.*)", path, re.DOTALL)
    file = os.path.expanduser(found[1]) if found else ""
    if found is None or not os.path.isfile(file):
        return None
    import h5py

    return (file, found[2]) if h5py.is_hdf5(file) else None


def file_of(path: str) -> str:
    """Return the file or folder of a path of `open_matrix`, without the dataset or the description."""
    return (raw(path) or hdf5(path) or existing_hdf5(path) or (path,))[0]


def locate(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Return the absolute path or the URL of an output, and the name of the dataset in an HDF5 file.

    Raises
    ------
    InputError
        For a suffix that is not of a writable format, or the URL of a store that distmm does not write to.
    """
    name = os.fspath(path)
    if is_url(name):
        return located(name), None
    file, dataset = hdf5(name) or (name, None)
    file = os.path.abspath(os.path.expanduser(file))
    if dataset is not None and os.fsencode(dataset) != dataset.encode(errors="replace"):
        raise InputError(f"{name}: HDF5 files have names in UTF-8, and that of the dataset is not: choose another one")
    suffix = os.path.splitext(file)[1].lower()
    in_group = any(part.endswith(".zarr") for part in os.path.dirname(file).split(os.sep))
    if suffix not in ("", ".npy", ".zarr", ".h5", ".hdf5") and not in_group:
        raise InputError(f"{file}: distmm cannot write the format {suffix!r}; give name.npy, name.zarr or name.h5")
    return file, dataset

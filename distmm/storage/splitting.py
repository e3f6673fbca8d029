"""Splits a user's path of an HDF5 file into file and dataset. It loads HDF5 only where a file has to be looked at."""

from __future__ import annotations

import os
import re

__all__ = ["existing_hdf5", "hdf5"]


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

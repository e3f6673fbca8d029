"""Checks that an output replaces nothing but one matrix of its format."""

from __future__ import annotations

import json
import os
import re
import stat

from distmm.errors import InputError
from distmm.storage import hdf5, paths
from distmm.storage.npy import NpyMatrix
from distmm.storage.regular_files import kind
from distmm.storage.zarr_folder import ZarrMatrix

__all__ = ["check_place", "check_replaceable"]

REMEDY = "it is not replaced: choose another name, or remove it yourself"

# Files and folders of a two-dimensional Zarr array of version 2 or 3, for any naming of chunks.
ZARR_NAME = re.compile(r"zarr\.json|\.zarray|\.zattrs|(c[./]?)?(\d+([./]\d+)?)?")


def check_place(path: str) -> None:
    """Refuse an output inside a Zarr array.

    Parameters
    ----------
    path : str
        File or folder of the output, absolute.

    Raises
    ------
    InputError
        With the name of the array.
    """
    folder = os.path.dirname(path)
    while folder != os.path.dirname(folder):
        if _is_array(folder):
            raise InputError(f"{path}: is inside the Zarr array {folder}, which it would damage; choose another place")
        folder = os.path.dirname(folder)


def check_replaceable(path: str, dataset: str | None) -> None:
    """Refuse to replace anything but one matrix of the format of the output's name.

    Parameters
    ----------
    path : str
        File or folder of the output, absolute.
    dataset : str or None
        Name in an HDF5 file, if the user gave one.

    Raises
    ------
    InputError
        With the contents that would be lost.
    """
    if not os.path.lexists(path):
        return
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        raise InputError(f"{path}: is a symbolic link to {os.readlink(path)}, and {REMEDY}")
    is_file = path.lower().endswith((".npy", ".h5", ".hdf5"))
    if not (stat.S_ISREG(mode) if is_file else stat.S_ISDIR(mode)):
        raise InputError(
            f"{path}: is {kind(mode)}, not {'a file' if is_file else 'the folder'} of a matrix, and {REMEDY}"
        )
    if paths.hdf5(path):
        hdf5.check_replaceable(path, dataset)
        return
    try:
        if is_file:
            NpyMatrix.open(path)
        else:
            _check_zarr(path)
    except InputError as error:
        raise InputError(f"{error}; {REMEDY}") from error


def _check_zarr(path: str) -> None:
    """Refuse a folder with other contents than one Zarr array."""
    if not _is_array(path):
        raise InputError(f"{path}: is a folder, but not a Zarr array")
    ZarrMatrix.open(path)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            inside = os.path.relpath(os.path.join(folder, name), path)
            if not ZARR_NAME.fullmatch(inside):
                raise InputError(f"{path}: contains {inside}, which is not part of a Zarr array")


def _is_array(folder: str) -> bool:
    """Whether a folder is a Zarr array, of version 2 or 3."""
    if os.path.isfile(os.path.join(folder, ".zarray")):
        return True
    described = os.path.join(folder, "zarr.json")
    if not os.path.isfile(described):
        return False
    try:
        with open(described) as file:
            content = json.load(file)
    except (OSError, ValueError):
        return False  # not a readable array
    return isinstance(content, dict) and content.get("node_type") == "array"

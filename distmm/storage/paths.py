"""A user's path of a matrix: its file and dataset, what an output may replace, and where it may be.

An output replaces nothing but one matrix of its format, and is in no other Zarr array. HDF5 is loaded only where a file
has to be looked at.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from distmm.errors import InputError
from distmm.storage.object_store import OBJECTS, is_url, located, without_scheme
from distmm.storage.records import records
from distmm.storage.regular_files import kind

# Name of the dataset in an HDF5 file that distmm writes, if the user gives none.
DATASET = "/C"

REMEDY = "it is not replaced: choose another name, or remove it yourself"

# Files, objects and folders of a two-dimensional Zarr array of version 2 or 3, for any naming of chunks.
ZARR_NAME = re.compile(r"zarr\.json|\.zarray|\.zattrs|(c[./])?\d+[./]\d+|(c/)?(\d+/)?")


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
        For what is no name, an empty name, a suffix that is not of a writable format, or the URL of a store that distmm
        does not write to.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(
            f"a result on disk is named by a str or a path, not by a {type(path).__name__}; for one in memory: matmul"
        )
    name = without_scheme(os.fspath(path))
    if is_url(name):
        return located(name), None
    if not name:
        raise InputError("the name of the result is empty; give name.npy, name.zarr or name.h5")
    file, dataset = hdf5(name) or (name, None)
    file = os.path.abspath(os.path.expanduser(file))
    if dataset is not None:
        if os.fsencode(dataset) != dataset.encode(errors="replace"):
            raise InputError(
                f"{name}: HDF5 files have names in UTF-8, and that of the dataset is not: choose another one"
            )
        dataset = "/" + "/".join(part for part in dataset.split("/") if part not in ("", "."))
        if dataset == "/":
            raise InputError(
                f"{name}: names the root group, not a dataset; give {file}:/C, or another name after the /"
            )
    suffix = os.path.splitext(file)[1].lower()
    in_group = any(part.endswith(".zarr") for part in os.path.dirname(file).split(os.sep))
    if suffix not in ("", ".npy", ".zarr", ".h5", ".hdf5") and not in_group:
        raise InputError(f"{file}: distmm cannot write the format {suffix!r}; give name.npy, name.zarr or name.h5")
    return file, dataset


def check_place(path: str) -> None:
    """Refuse an output inside a Zarr array, or inside the folder of an unfinished job.

    Parameters
    ----------
    path : str
        File or folder of the output, absolute, or its URL.

    Raises
    ------
    InputError
        With the name of the array or folder.
    """
    above = os.path.dirname(path)
    while above != os.path.dirname(above) and not (is_url(above) and above.count("/") < 3):  # not the bucket itself
        if is_array(above):
            raise InputError(f"{path}: is inside the Zarr array {above}, which it would damage; choose another place")
        if above.endswith(".job") and records(above).exists(os.path.join(above, "manifest.json")):
            raise InputError(f"{path}: is in the folder of the job {above}, which removes it; choose another place")
        above = os.path.dirname(above)


def check_replaceable(path: str, dataset: str | None) -> None:
    """Refuse to replace anything but one matrix of the format of the output's name.

    Parameters
    ----------
    path : str
        File or folder of the output, absolute, or its URL.
    dataset : str or None
        Name in an HDF5 file, if the user gave one.

    Raises
    ------
    InputError
        With the contents that would be lost.
    """
    if is_url(path):
        _check_names(path, OBJECTS.everything(path))
        return
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
    from distmm.storage import hdf5 as datasets
    from distmm.storage import npy, zarr_folder  # late: `is_array` needs no NumPy

    if hdf5(path):
        datasets.check_replaceable(path, dataset)
        return
    try:
        if is_file:
            npy.open_npy(path)
        elif not is_array(path):
            raise InputError(f"{path}: is a folder, but not a Zarr array")
        else:
            zarr_folder.ZarrMatrix.open(path)
    except InputError as error:
        raise InputError(f"{error}; {REMEDY}") from error
    if not is_file:
        found = ((name, name.relative_to(path).as_posix()) for name in Path(path).rglob("*"))
        _check_names(path, (f"{inside}/" if name.is_dir() else inside for name, inside in found))


def is_array(place: str) -> bool:
    """Whether a folder or a URL is a Zarr array of version 2 or 3."""
    found = {}
    for name in ("zarr.json", ".zarray"):
        path = os.path.join(place, name)
        try:
            if is_url(place) or os.path.isfile(path):  # a pipe may never end
                found[name] = records(path).read(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            if is_url(place):
                raise InputError(f"{place}: cannot be read: {error}") from error
    if ".zarray" in found:
        return True
    try:
        content = json.loads(found.get("zarr.json", b"null"))
    except ValueError:
        return False  # not a readable array
    return isinstance(content, dict) and content.get("node_type") == "array"


def _check_names(path: str, names: Iterable[str]) -> None:
    """Refuse names that are not of a Zarr array."""
    other = next((name for name in names if not ZARR_NAME.fullmatch(name)), None)
    if other is not None:
        raise InputError(f"{path}: contains {other}, which is not part of a Zarr array; {REMEDY}")

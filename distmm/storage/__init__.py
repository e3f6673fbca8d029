"""Matrices on disk: ``.npy``, Zarr and HDF5, read and written block by block, in any mix."""

from __future__ import annotations

import os
from typing import Any

from distmm.errors import InputError
from distmm.storage import flat, hdf5, npy
from distmm.storage.durability import fsync, fsync_tree
from distmm.storage.matrix import Matrix, check_dtype, check_shape
from distmm.storage.npy import NpyMatrix
from distmm.storage.output import Output, Target
from distmm.storage.overwriting import check_place, check_replaceable
from distmm.storage.zarr_folder import ZarrMatrix, ZarrTarget

__all__ = [
    "Matrix", "Target", "check_output", "create_output", "fsync", "locate", "open_matrix", "reopen_output",
]  # fmt: skip

FORMATS = (
    "name.npy, name.zarr (or a Zarr folder, group/name, URL), name.h5, name.h5:/dataset, and raw binary as "
    "name.bin:1000x500:float32"
)


def open_matrix(path: str | os.PathLike[str]) -> Matrix:
    """Open a matrix on disk without reading its elements.

    Parameters
    ----------
    path : str or path
        A ``.npy`` file, a Zarr array of version 2 or 3 (folder, member of a group, URL that fsspec knows), an HDF5
        file ``file.h5``, with ``:/path/of/dataset`` unless it holds one matrix only, or raw binary
        ``file:ROWSxCOLUMNS:TYPE``, with ``:F`` where columns come first.

    Returns
    -------
    Matrix
        Lazy and picklable; ``matrix[i0:i1, j0:j1]`` is a NumPy array.

    Raises
    ------
    InputError
        For a path that is missing, damaged, not two-dimensional, or of elements that are not numbers.
    """
    name = os.fspath(path)
    if "://" in name:
        return ZarrMatrix.open(name)
    raw = flat.split(name)
    file, detail = raw or hdf5.split(name) or (name, None)
    file = os.path.abspath(os.path.expanduser(file))
    if not os.path.exists(file):
        raise InputError(f"{file}: no such file or folder; known are {FORMATS}")
    if os.path.isdir(file):
        return ZarrMatrix.open(file)
    if raw:
        return flat.RawMatrix.open(file, raw[1])
    if hdf5.split(name):
        return hdf5.Hdf5Matrix.open(file, detail)
    if file.lower().endswith(".npy"):
        return NpyMatrix.open(file)
    raise InputError(f"{file}: a file of unknown format; known are {FORMATS}")


def locate(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Return the absolute path of an output, and the dataset's name inside an HDF5 file.

    Raises
    ------
    InputError
        For a URL, or a suffix of no format that can be written.
    """
    name = os.fspath(path)
    if "://" in name:
        raise InputError(
            f"{name}: outputs are written to local or mounted folders, not to URLs, since what makes a job safe "
            f"(fsync, rename, lock) is not there; write C to a folder, and copy it when it is complete, as with "
            f"rclone copy C.zarr ... or aws s3 cp --recursive C.zarr {name}"
        )
    file, dataset = hdf5.split(name) or (name, None)
    file = os.path.abspath(os.path.expanduser(file))
    suffix = os.path.splitext(file)[1].lower()
    in_group = any(part.endswith(".zarr") for part in os.path.dirname(file).split(os.sep))
    if suffix not in ("", ".npy", ".zarr", ".h5", ".hdf5") and not in_group:
        raise InputError(f"{file}: no format to write is known for {suffix!r}; known are name.npy, name.zarr, name.h5")
    return file, dataset


def check_output(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse an output that would damage something else, before anything is made.

    Parameters
    ----------
    path : str or path
        Final name.
    overwrite : bool
        Whether an existing matrix may be replaced.

    Raises
    ------
    InputError
        For an output that lies inside a Zarr array; with `overwrite`, for one that takes the place of
        anything but one matrix of its own format: a pipe, a device, a symbolic link, a text, several matrices.
    """
    file, dataset = locate(path)
    check_place(file)
    if overwrite:
        check_replaceable(file, dataset)


def create_output(
    path: str | os.PathLike[str],
    shape: tuple[int, int],
    dtype: Any,
    chunks: tuple[int, int],
    overwrite: bool = False,
    draft: str | None = None,
    job: str | None = None,
) -> Target:
    """Make the file or folder that a product is written to.

    The format follows the suffix: ``.npy``, ``.h5`` or ``.hdf5``, and Zarr for ``.zarr``, none, or a member of a Zarr
    group. What exists under that name stays until ``target.output.commit()``.

    Parameters
    ----------
    path : str or path
        Final name.
    shape : tuple of int
        ``(rows, columns)``.
    dtype : dtype
        Of the elements.
    chunks : tuple of int
        C's blocks ``(rows, columns)``: the chunks of a Zarr array, so that each has one writer.
    overwrite : bool, default False
        Whether an existing matrix may be replaced.
    draft : str, optional
        Where to write until then; by default a hidden sibling.
    job : str, optional
        Id of the job that makes it, which Zarr arrays keep as an attribute.

    Returns
    -------
    Target
        Takes blocks by ``target[i0:i1, j0:j1] = block``.

    Raises
    ------
    InputError
        For an output that exists, that cannot be written, that does not fit on the disk, or whose format is unknown.
    """
    file, dataset = locate(path)
    shape, dtype = check_shape(file, shape), check_dtype(file, dtype)
    check_output(path, overwrite)
    output = Output.reserve(file, shape[0] * shape[1] * dtype.itemsize, overwrite, draft)
    try:
        if hdf5.split(file):
            target: Target = hdf5.create(output, dataset or "/C", shape, dtype)
        elif file.lower().endswith(".npy"):
            target = npy.create(output, shape, dtype)
        else:
            target = ZarrTarget.create(output, shape, dtype, chunks, job)
        fsync_tree(output.draft)
        fsync(os.path.dirname(output.draft))
        return target
    except OSError as error:
        output.discard()
        raise InputError(f"{file}: cannot be written: {error}; choose another folder") from error


def reopen_output(path: str | os.PathLike[str], draft: str, overwrite: bool = False) -> Target:
    """Go on with an output that `create_output` has made at `draft`; its shape and type are read from the draft."""
    file, _ = locate(path)
    output = Output(file, draft, overwrite)
    if hdf5.split(file):
        return hdf5.reopen(output)
    return npy.reopen(output) if file.lower().endswith(".npy") else ZarrTarget.reopen(output)

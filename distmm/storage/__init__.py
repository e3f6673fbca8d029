"""Matrices on disk: ``.npy``, Zarr and HDF5, read and written block by block, in any mix."""

from __future__ import annotations

import os
from typing import Any

from distmm.errors import InputError
from distmm.storage import hdf5
from distmm.storage.matrix import Matrix, check_dtype, check_shape
from distmm.storage.npy import NpyMatrix, NpyTarget
from distmm.storage.output import Output, Target
from distmm.storage.zarr_folder import ZarrMatrix, ZarrTarget

__all__ = ["Matrix", "Target", "create_output", "open_matrix"]

FORMATS = "name.npy, name.zarr (or a Zarr folder, group/name, URL), name.h5, name.h5:/dataset"


def open_matrix(path: str | os.PathLike[str]) -> Matrix:
    """Open a matrix on disk without reading its elements.

    Parameters
    ----------
    path : str or path
        A ``.npy`` file, a Zarr array (folder, member of a group, URL), or an HDF5 file ``file.h5``, with
        ``:/path/of/dataset`` unless it holds one matrix only.

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
    file, dataset = hdf5.split(name) or (name, None)
    file = os.path.abspath(os.path.expanduser(file))
    if not os.path.exists(file):
        raise InputError(f"{file}: no such file or folder; known are {FORMATS}")
    if os.path.isdir(file):
        return ZarrMatrix.open(file)
    if hdf5.split(name):
        return hdf5.Hdf5Matrix.open(file, dataset)
    if file.lower().endswith(".npy"):
        return NpyMatrix.open(file)
    raise InputError(f"{file}: a file of unknown format; known are {FORMATS}")


def create_output(
    path: str | os.PathLike[str],
    shape: tuple[int, int],
    dtype: Any,
    chunks: tuple[int, int],
    overwrite: bool = False,
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

    Returns
    -------
    Target
        Takes blocks by ``target[i0:i1, j0:j1] = block``.

    Raises
    ------
    InputError
        For an output that exists, that cannot be written, that does not fit on the disk, or whose format is unknown.
    """
    name = os.fspath(path)
    if "://" in name:
        raise InputError(f"{name}: outputs are written to local or mounted folders, not to URLs")
    shape, dtype = check_shape(name, shape), check_dtype(name, dtype)
    file, dataset = hdf5.split(name) or (name, None)
    file = os.path.abspath(os.path.expanduser(file))
    suffix = os.path.splitext(file)[1].lower()
    in_group = any(part.endswith(".zarr") for part in os.path.dirname(file).split(os.sep))
    if suffix not in ("", ".npy", ".zarr", ".h5", ".hdf5") and not in_group:
        raise InputError(f"{file}: no format is known for {suffix!r}; known are {FORMATS}")
    if overwrite and os.path.isdir(file):
        ZarrTarget.check_replaceable(file)
    elif overwrite and os.path.lexists(file) and hdf5.split(name):
        hdf5.Hdf5Target.check_replaceable(file)
    output = Output.reserve(file, shape[0] * shape[1] * dtype.itemsize, overwrite)
    try:
        if hdf5.split(name):
            return hdf5.Hdf5Target.create(output, dataset or "/C", shape, dtype)
        if suffix == ".npy":
            return NpyTarget.create(output, shape, dtype)
        return ZarrTarget.create(output, shape, dtype, chunks)
    except OSError as error:
        output.discard()
        raise InputError(f"{file}: cannot be written: {error}; choose another folder") from error

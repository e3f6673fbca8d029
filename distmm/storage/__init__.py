"""Matrices on disk and in object stores (``.npy``, Zarr, HDF5, raw binary), read and written block by block."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

from distmm.errors import InputError
from distmm.storage import paths
from distmm.storage.durability import fsync, fsync_tree
from distmm.storage.object_store import is_url, without_scheme
from distmm.storage.paths import check_place, check_replaceable, file_of, is_array, locate
from distmm.storage.stamps import stamp_of

if TYPE_CHECKING:
    from distmm.storage.matrix import Matrix
    from distmm.storage.output import Output, TargetArray

# Modules that use NumPy, Zarr or HDF5 are imported in functions: they take half a second; `distmm status` needs none.

__all__ = [
    "check_output", "create_output", "file_of", "fsync", "is_there", "is_url", "locate",
    "open_matrix", "output_type", "reopen_output", "replaced", "stamp_of",
]  # fmt: skip

READS = (
    "distmm reads name.npy, name.zarr (or a Zarr folder, group/name, URL), name.h5, name.h5:/dataset, and raw binary "
    "as name.bin:1000x500:float32"
)


def open_matrix(path: str | os.PathLike[str]) -> Matrix:
    """Open a matrix on disk without reading its elements.

    Parameters
    ----------
    path : str or path
        A ``.npy`` file; a Zarr array of version 2 or 3 (a folder, a member of a group, or a URL that fsspec supports);
        an HDF5 file ``file.h5``, followed by ``:/path/of/dataset`` if it has several matrices, or if it has another
        suffix (``file.nc:/x``); or raw binary as ``file:ROWSxCOLUMNS:TYPE``, followed by ``:F`` for Fortran order.
        The URL ``file:///path`` is another name of ``/path``.

    Returns
    -------
    Matrix
        Lazy and picklable. ``matrix[i0:i1, j0:j1]`` is a NumPy array.

    Raises
    ------
    InputError
        If the path is missing or damaged, or the array is not two-dimensional or not of numbers.
    """
    if not (name := without_scheme(os.fspath(path))):
        raise InputError(f"the name of a matrix is empty; {READS}")
    if is_url(name):
        return _open_zarr(name)
    raw = paths.raw(name)
    of_hdf5 = paths.hdf5(name) or paths.existing_hdf5(name)
    file, detail = raw or of_hdf5 or (name, None)
    file = os.path.abspath(os.path.expanduser(file))
    _check_readable(file)
    if os.path.isdir(file):
        return _open_zarr(file)
    if raw:
        from distmm.storage.flat import open_raw  # late, as the others: each format needs its own library

        return open_raw(file, raw[1])
    if of_hdf5:
        from distmm.storage.hdf5 import Hdf5Matrix

        return Hdf5Matrix.open(file, detail)
    if file.lower().endswith(".npy"):
        from distmm.storage.npy import open_npy

        return open_npy(file)
    raise InputError(f"{file}: a file of unknown format; {READS}")


def _check_readable(file: str) -> None:
    try:
        if stat.S_ISREG(os.stat(file).st_mode):
            open(file, "rb").close()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise InputError(f"{file}: no such file or folder; {READS}") from error
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read: {error.strerror}; check the permissions of it and of the folders above it"
        ) from error


def _open_zarr(path: str) -> Matrix:
    from distmm.storage.zarr_folder import ZarrMatrix

    return ZarrMatrix.open(path)


def check_output(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse an output that would damage other data. Nothing has been created yet.

    Parameters
    ----------
    path : str or path
        Final name.
    overwrite : bool
        Whether an existing matrix may be replaced.

    Raises
    ------
    InputError
        If the output is inside a Zarr array. With `overwrite`: if it would replace anything but a single matrix of the
        same format, for example a pipe, a device, a symbolic link, a text file, or several matrices.
    """
    file, dataset = locate(path)
    check_place(file)
    if overwrite:
        check_replaceable(file, dataset)


def create_output(
    path: str | os.PathLike[str],
    shape: tuple[int, ...],
    dtype: Any,
    chunks: tuple[int, ...],
    overwrite: bool = False,
    draft: str | None = None,
    job: str | None = None,
) -> TargetArray:
    """Create the file or folder that a product is written to.

    The suffix determines the format: ``.npy``, ``.h5`` or ``.hdf5``; Zarr for ``.zarr``, for no suffix, and for a
    member of a Zarr group. An existing output with that name is kept until ``target.output.commit()``. Object stores
    have no rename: there it is kept until the first block is written (`distmm.storage.zarr_objects`).

    Parameters
    ----------
    path : str or path
        Final name.
    shape : tuple of int
        ``(rows, columns)``.
    dtype : dtype
        Type of the elements.
    chunks : tuple of int
        Chunks ``(rows, columns)`` of a Zarr array. A block of C consists of whole chunks, so that each chunk has one
        writer. In an object store a large chunk becomes several.
    overwrite : bool, default False
        Whether an existing matrix may be replaced.
    draft : str, optional
        Name of the output until it is committed. By default a hidden name in the same folder.
    job : str, optional
        Id of the job. Zarr arrays get it as an attribute.

    Returns
    -------
    TargetArray
        ``target[i0:i1, j0:j1] = block`` writes a block.

    Raises
    ------
    InputError
        If the output exists, cannot be written, does not fit on the disk, or has an unknown format.
    """
    from distmm.storage import hdf5, npy
    from distmm.storage.matrix import check_dtype, check_shape
    from distmm.storage.zarr_objects import ObjectTarget
    from distmm.storage.zarr_target import ZarrTarget

    file, dataset = locate(path)
    shape, dtype = check_shape(file, shape), check_dtype(file, dtype)
    check_output(path, overwrite)
    output = output_type(file).reserve(file, shape[0] * shape[1] * dtype.itemsize, overwrite, draft)
    try:
        if is_url(file):
            return ObjectTarget.create(output, shape, dtype, chunks, job)
        if paths.hdf5(file):
            target: TargetArray = hdf5.create(output, dataset or paths.DATASET, shape, dtype)
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


def replaced(path: str) -> str:
    """Return the name of an output with the dataset that it replaces: that of an HDF5 file, if the user names none."""
    file, dataset = locate(path)
    is_named = dataset is not None or not paths.hdf5(file) or not os.path.isfile(file)
    return path if is_named else open_matrix(path).path


def reopen_output(path: str | os.PathLike[str], draft: str, overwrite: bool = False) -> TargetArray:
    """Open a draft that `create_output` has created, to continue writing. Shape and type are read from the draft."""
    from distmm.storage import hdf5, npy
    from distmm.storage.zarr_objects import ObjectTarget
    from distmm.storage.zarr_target import ZarrTarget

    file, _ = locate(path)
    output = output_type(file)(file, draft, overwrite)
    if is_url(file):
        return ObjectTarget.reopen(output)
    if paths.hdf5(file):
        return hdf5.reopen(output)
    return npy.reopen(output) if file.lower().endswith(".npy") else ZarrTarget.reopen(output)


def output_type(path: str) -> type[Output]:
    """Return the class of the output at a path of `locate`: a file or folder, or an array in an object store."""
    from distmm.storage.output import Output
    from distmm.storage.zarr_objects import ObjectOutput

    return ObjectOutput if is_url(path) else Output


def is_there(path: str) -> bool:
    """Whether the output exists: a file or folder with its name, or an array in an object store."""
    return is_array(path) if is_url(path) else os.path.lexists(path)

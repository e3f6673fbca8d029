"""Types of operands: accepted, unwrapped (xarray, DLPack), or refused with advice what to give instead."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from typing import Any, Literal

import dask
import numpy as np
from dask.highlevelgraph import MaterializedLayer

from distmm.errors import InputError
from distmm.product.dlpack import as_native, is_foreign
from distmm.storage.matrix import Matrix
from distmm.transfer.pickling import pickled

logger = logging.getLogger(__name__)

# What to give in place of objects that are no dense arrays, by the first part of their type's full name.
INSTEAD = {
    ("pandas.", "polars."): "a table: give its values, {name}.to_numpy()",
    ("cudf.",): "a table: give its values, {name}.to_cupy()",
    ("dask.dataframe.",): "a table: give {name}.to_dask_array(lengths=True)",
    ("scipy.", "cupyx."): "a sparse matrix, and products are dense: give {name}.toarray() if that fits into memory",
    ("sparse.",): "a sparse array, and products are dense: give {name}.todense() if that fits into memory",
    ("dask.delayed.", "distributed.client."): "computed later: give dask.array.from_delayed({name}, shape, dtype)",
    ("builtins.str", "pathlib."): "the name of a file: open it, as zarr.open_array and numpy.load(mmap_mode='r') do",
    ("xarray.core.dataset.",): "which has several arrays: give one of them, {name}['variable']",
}


def package_of(x: Any) -> str:
    """Return the name of the package that defines an object's type, without importing the package."""
    return type(x).__module__.partition(".")[0]


def is_dask(x: Any) -> bool:
    """Whether an object is a Dask array, without the import of `dask.array`, which takes most of a second."""
    arrays = sys.modules.get("dask.array")
    return arrays is not None and isinstance(x, arrays.Array)


def kind_of(source: Any, name: str) -> Literal["numpy", "cupy"]:
    """Return whether an array, or the blocks of a Dask array, are NumPy's or CuPy's.

    Raises
    ------
    InputError
        For blocks of other types.
    """
    chunked = is_dask(source)
    meta = source._meta if chunked else source
    package = package_of(meta)
    if package == "cupy":
        return "cupy"
    # Subclasses define other products: masked arrays skip elements, np.matrix changes shapes.
    if type(meta) in (np.ndarray, np.memmap) or not (chunked or isinstance(meta, np.ndarray)):
        return "numpy"
    raise InputError(
        f"{name} has blocks of type {type(meta).__name__} ({package}): convert them to plain NumPy or CuPy arrays first"
    )


def check_query_planning() -> None:
    """Refuse Dask's expression arrays (``array.query-planning``). distmm makes arrays from graphs.

    Raises
    ------
    InputError
        If Dask's configuration selects expression arrays.
    """
    arrays = sys.modules.get("dask.array")
    if arrays is None:  # it reads the configuration when it is imported
        expressions = bool(dask.config.get("array.query-planning", None))
    else:
        expressions = arrays.Array is not arrays.core.Array
    if expressions:
        raise InputError(
            "Dask's configuration has array.query-planning: True, and distmm does not support such arrays: set it to "
            "False before dask.array is imported, for example by DASK_ARRAY__QUERY_PLANNING=False"
        )


def as_array(source: Any, name: str) -> Any:
    """Return the array that holds an operand's elements.

    For an xarray object these are its ``data``, for an array with DLPack a NumPy or CuPy view of its memory, and for a
    list a NumPy array. Any other `source` is returned unchanged.

    Raises
    ------
    InputError
        For objects that are not arrays, and for sizes that are unknown or not whole numbers.
    """
    check_query_planning()
    package = package_of(source)
    kind = type(source).__name__
    full_name = f"{type(source).__module__}.{kind}"
    for starts, advice in INSTEAD.items():
        if full_name.startswith(starts):
            raise InputError(f"{name} is a {kind} of {package}, {advice.format(name=name)}")
    if package == "xarray" and hasattr(source, "data") and hasattr(source, "dims"):
        return as_array(source.data, name)
    if is_foreign(source):
        return as_native(source, name)
    if isinstance(source, (list, tuple, int, float, complex)):
        try:
            source = np.asarray(source)
        except ValueError as error:
            raise InputError(
                f"{name} is a {kind} that is not an array ({error}): give rows of the same length"
            ) from None
    check_like_array(source, name, "__getitem__")
    if any(isinstance(n, float) and math.isnan(n) for n in source.shape):
        raise InputError(
            f"{name} has unknown chunk sizes (shape {source.shape}): call {name}.compute_chunk_sizes() first"
        )
    if any(int(n) != n or n < 0 for n in source.shape):
        raise InputError(f"{name} has shape {source.shape}: sizes must be whole numbers of at least 0")
    return _by_path(source, name) if package in ("h5py", "zarr") else source


def check_like_array(x: Any, name: str, access: Literal["__getitem__", "__setitem__"]) -> None:
    """Refuse an object without shape, type or elements, one that is closed, and elements that NumPy does not know.

    Raises
    ------
    InputError
        With the type of the object.
    """
    if package_of(x) == "h5py" and not x:
        raise InputError(f"{name} is a dataset of an HDF5 file that has been closed: open it again")
    kind = type(x).__name__
    if missing := [each for each in ("shape", "dtype", access) if not hasattr(x, each)]:
        raise InputError(
            f"{name} is a {kind} without {', '.join(missing)}: "
            "give a Dask, NumPy or CuPy array, or an object like a Zarr array"
        )
    try:
        np.dtype(x.dtype)
    except TypeError:
        raise InputError(
            f"{name} is a {kind} of {package_of(x)} with elements of {x.dtype}, a type that NumPy does not know: give "
            "a NumPy or CuPy array, or an array of another package that exports its memory by DLPack"
        ) from None


def _by_path(source: Any, name: str) -> Any:
    """Return what the path of an open Zarr array or HDF5 dataset would give, and warn of chunks that are missing."""
    from distmm.storage.opened import by_path  # late: the import takes a second, and others need no storage

    found = by_path(source, name)
    if found is not source and (what := found.missing()) is not None:
        logger.warning("%s: %s: %s; they may be empty, or lost", name, found.path, what)
    return found


def _layers(array: Any) -> Iterator[Any]:
    """Yield what stands for each layer of an array's graph that distmm did not make, and that is not computed yet."""
    from distributed import Future

    for name, layer in array.dask.layers.items():
        if name.startswith("distmm-") or not layer:
            continue
        part = next(iter(layer.mapping.values())) if isinstance(layer, MaterializedLayer) else layer
        if not isinstance(part, (Future, np.ndarray)):
            yield part


def check_sendable(source: Any, name: str) -> None:
    """Refuse what cannot be sent to workers: an array in this process's memory, an open file, or what holds a lock.

    Of a Dask array, one task of each layer is pickled for a trial, which takes some 0.2 ms.

    Raises
    ------
    InputError
        With the reason and the remedy.
    """
    if isinstance(source, (np.ndarray, Matrix)) or package_of(source) == "cupy":
        return
    parts = list(_layers(source)) if is_dask(source) else [source]
    if {"distmm", "h5py", "zarr"} & set(map(package_of, parts)):
        from distmm.storage.opened import unsendable

        if (why := next(filter(None, map(unsendable, parts)), None)) is not None:
            raise InputError(f"{name} {why}")
    buffers: list[Any] = []
    try:
        for part in parts:
            pickled(part, buffers.append)
    except Exception as error:
        raise InputError(
            f"{name} cannot be sent to workers ({error}): it, or a function that computes it, has what only this "
            "process can use, such as a lock or an open file. Open that inside the function, or store the array "
            "(to_zarr) and give the stored one"
        ) from error

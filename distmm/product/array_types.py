"""Types of operands: accepted, unwrapped (xarray, DLPack), or refused with advice what to give instead."""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import dask
import ml_dtypes
import numpy as np
from dask.highlevelgraph import MaterializedLayer
from distributed import Future

from distmm.errors import InputError
from distmm.planning.problem import FLOAT8
from distmm.storage.matrix import Matrix
from distmm.transfer.gpu_allocations import is_on_gpu
from distmm.transfer.pickling import pickled
from distmm.worker import gpu

logger = logging.getLogger(__name__)

# Advice for tables and sparse matrices, by the package of their type.
INSTEAD = {
    "pandas": "a table: give its values, {name}.to_numpy()",
    "polars": "a table: give its values, {name}.to_numpy()",
    "cudf": "a table: give its values, {name}.to_cupy()",
    "scipy": "a sparse matrix, and products here are dense: give {name}.toarray() where that fits into memory",
    "cupyx": "a sparse matrix, and products here are dense: give {name}.toarray() where that fits into memory",
    "sparse": "a sparse array, and products here are dense: give {name}.todense() where that fits into memory",
}


def package_of(x: Any) -> str:
    """Return the name of the package that defines an object's type, without importing the package."""
    return type(x).__module__.partition(".")[0]


def is_dask(x: Any) -> bool:
    """Whether an object is a Dask array, without the import of `dask.array`, which takes most of a second."""
    arrays = sys.modules.get("dask.array")
    return arrays is not None and isinstance(x, arrays.Array)


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
    if package == "xarray" and hasattr(source, "data") and hasattr(source, "dims"):
        return as_array(source.data, name)
    if package in INSTEAD:
        raise InputError(f"{name} is a {kind} of {package}, {INSTEAD[package].format(name=name)}")
    if type(source).__module__.startswith("dask.dataframe"):
        raise InputError(f"{name} is a {kind} of Dask, a table: give {name}.to_dask_array(lengths=True)")
    if is_foreign(source):
        return as_native(source, name)
    if package == "h5py" and not source:
        raise InputError(f"{name} is a dataset of an HDF5 file that has been closed: open it again")
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
    """Refuse an object that has no shape, type or elements, or a type of elements that NumPy does not know.

    Raises
    ------
    InputError
        With the type of the object.
    """
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
    if package_of(source) in ("distmm", "h5py"):
        from distmm.storage.opened import unsendable

        if (why := unsendable(source)) is not None:
            raise InputError(f"{name} {why}")
    buffers: list[Any] = []
    try:
        for part in _layers(source) if is_dask(source) else [source]:
            pickled(part, buffers.append)
    except Exception as error:
        raise InputError(
            f"{name} cannot be sent to workers ({error}): it, or a function that computes it, has what only this "
            "process can use, such as a lock or an open file. Open that inside the function, or store the array "
            "(to_zarr) and give the stored one"
        ) from error


# Arrays of other packages, such as PyTorch's and JAX's, as NumPy or CuPy arrays of the same memory, and back. The
# protocol is DLPack (https://dmlc.github.io/dlpack/latest/python_spec.html). ``__dlpack_device__`` names the device of
# an array, and ``__dlpack__`` exports its memory. Numba's arrays in GPU memory have CUDA's array interface instead.

# DLDeviceType of memory that NumPy can read (kDLCPU, kDLCUDAHost), and CuPy (kDLCUDA, kDLCUDAManaged).
HOST, GPU = (1, 3), (2, 13)

# By package of the arrays' type: the module that takes memory by DLPack. Only these get results in their own form.
FOREIGN = {"torch": "torch", "jaxlib": "jax.numpy"}

_LACKING = {dtype.name: dtype for dtype in (np.dtype(ml_dtypes.bfloat16), *FLOAT8)}


def is_foreign(x: Any) -> bool:
    """Whether an array of another package than NumPy and CuPy exports its memory by DLPack or CUDA's interface."""
    if isinstance(x, np.ndarray) or type(x).__module__.startswith("cupy"):
        return False
    return hasattr(x, "__dlpack_device__") or hasattr(x, "__cuda_array_interface__")


def as_native(source: Any, name: str) -> Any:
    """Return a NumPy or CuPy view of an array for which `is_foreign` holds, without a copy.

    Raises
    ------
    InputError
        If the array does not export its memory (a PyTorch tensor with gradients, an array on several devices), has a
        type that DLPack or NumPy does not know, or is on a device that is neither the host nor an NVIDIA GPU.
    """
    kind = f"{type(source).__module__}.{type(source).__name__}"
    try:
        where = source.__dlpack_device__()[0] if hasattr(source, "__dlpack_device__") else GPU[0]
        if where in HOST:
            return _view(source, np.from_dlpack)
        if where in GPU:
            return _view(source, gpu.from_dlpack)
    except ImportError as error:
        raise InputError(
            f"{name} is a {kind} on a GPU, which needs CuPy ({error}): type pip install '.[cuda13]', or give a "
            f"copy on the host, such as {name}.cpu()"
        ) from error
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{name} is a {kind} that does not export its memory by DLPack: {error}") from error
    raise InputError(
        f"{name} is a {kind} on a device of DLPack's type {int(where)}, neither the host nor an NVIDIA GPU: give a "
        f"copy on the host, such as {name}.cpu()"
    )


def as_writable(source: Any, name: str) -> Any:
    """Return a view as `as_native` does. The view is writable if the package of `source` allows writes.

    Older versions of DLPack do not say whether memory is writable. NumPy then treats it as read-only. The NumPy array
    of ``__array__``, which PyTorch has too, does say whether it is writable.

    Raises
    ------
    InputError
        As `as_native`, and for an array of JAX, which nothing may change.
    """
    if type(source).__module__.startswith("jax"):
        raise InputError(f"{name} is an array of JAX, which is read-only: give a CuPy, PyTorch or NumPy array")
    view = as_native(source, name)
    if isinstance(view, np.ndarray) and not view.flags.writeable and hasattr(source, "__array__"):
        other = np.asarray(source)
        same = other.__array_interface__["data"][0] == view.__array_interface__["data"][0]
        if same and other.flags.writeable and (other.shape, other.strides) == (view.shape, view.strides):
            return other
    return view


def _view(source: Any, from_dlpack: Callable[[Any], Any]) -> Any:
    """Return the view. NumPy lacks some types: PyTorch's are viewed as integers, JAX's come as a NumPy array."""
    package, _, name = str(source.dtype).rpartition(".")
    dtype = _LACKING.get(name)
    if package == "torch" and dtype is not None:
        if dtype.itemsize == 1 and from_dlpack is not np.from_dlpack:
            raise TypeError(f"{name} on a GPU: give a copy on the host, such as x.cpu()")
        return from_dlpack(source.view(getattr(sys.modules["torch"], f"int{8 * dtype.itemsize}"))).view(dtype)
    if from_dlpack is np.from_dlpack and any(source.dtype == each.type for each in _LACKING.values()):
        return np.asarray(source)
    return from_dlpack(source)


def package_among(arrays: Iterable[Any]) -> str:
    """Return the first `package` of some operands that is `FOREIGN`; "" if there is none."""
    return next((array.package for array in arrays if array.package in FOREIGN), "")


def as_given(result: Any, package: str) -> Any:
    """Return a NumPy or CuPy array in the form of `package`, in the same memory; unchanged if that is not `FOREIGN`."""
    if package not in FOREIGN:
        return result
    namespace = importlib.import_module(FOREIGN[package])
    if not is_on_gpu(result):
        result = np.require(result, requirements="W")
    if result.dtype == ml_dtypes.bfloat16:
        return namespace.from_dlpack(result.view(np.int16)).view(namespace.bfloat16)
    return namespace.from_dlpack(result)

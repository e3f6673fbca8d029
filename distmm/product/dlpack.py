"""Arrays of other packages, such as PyTorch's and JAX's, as NumPy or CuPy arrays of the same memory, and back.

The protocol is DLPack (https://dmlc.github.io/dlpack/latest/python_spec.html). ``__dlpack_device__`` names the device
of an array, and ``__dlpack__`` exports its memory. Numba's arrays in GPU memory have CUDA's array interface instead.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from distmm.errors import InputError
from distmm.planning.problem import FLOAT8
from distmm.transfer.gpu_allocations import is_on_gpu
from distmm.worker import gpu

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
    package, _, name = str(getattr(source, "dtype", "")).rpartition(".")
    dtype = _LACKING.get(name)
    if package == "torch" and dtype is not None:
        if dtype.itemsize == 1 and from_dlpack is not np.from_dlpack:
            raise TypeError(f"{name} on a GPU: give a copy on the host, such as x.cpu()")
        return from_dlpack(source.view(getattr(sys.modules["torch"], f"int{8 * dtype.itemsize}"))).view(dtype)
    if from_dlpack is np.from_dlpack and not package and dtype is not None:
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

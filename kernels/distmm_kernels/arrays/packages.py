"""The packages of arrays: which one has an array, and how NumPy's, CuPy's and those of DLPack are multiplied.

`distmm_kernels.arrays.pytorch` has PyTorch's. Each module is imported when an array of its package comes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from distmm_kernels.arrays import on_gpu
from distmm_kernels.arrays.products import Options, captured, product, result_of
from distmm_kernels.device import Device, cpu

Multiply = Callable[[Any, Any, Any, Any, Options], Any]
GPU = (2, 13)  # DLDeviceType of CUDA memory, and of managed memory

_kinds: dict[type, str] = {}


def kind_of(x: Any, name: str = "a") -> str:
    """Return the package of an array: ``"numpy"``, ``"torch"``, ``"cupy"``, ``"numba"``, or ``"dlpack"`` for others.

    Raises
    ------
    TypeError
        If it is not an array, or one that only stands for an array, as inside of ``jax.jit``.
    """
    kind = _kinds.get(type(x))
    if kind is None:
        kind = _kinds[type(x)] = _kind(x, name)
    return kind


def _kind(x: Any, name: str) -> str:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost: give {name}.filled(0)")
    packages = {each.__module__.partition(".")[0] for each in type(x).__mro__}
    for package in ("torch", "cupy", "numpy"):
        if package in packages and hasattr(x, "ndim"):
            return package
    if hasattr(x, "__cuda_array_interface__") and "numba" in packages:
        return "numba"
    if hasattr(x, "__dlpack__") and hasattr(x, "__array_namespace__") and hasattr(x, "__dlpack_device__"):
        return "dlpack"
    raise TypeError(
        f"{name} is a {type(x).__module__}.{type(x).__name__}: give an array of PyTorch, CuPy, NumPy, JAX or Numba, or "
        "one with DLPack"
    )


def multiply_of(a: Any, b: Any, c: Any, out: Any, device: Any) -> Multiply:
    """Return the function that multiplies arrays of this package."""
    kind = kind_of(a)
    plain = c is None and out is None and type(b) is type(a)
    for name, x in () if plain else (("b", b), ("c", c), ("out", out)):
        if x is not None and (other := kind_of(x, name)) != kind:
            raise TypeError(f"a is an array of {kind}, {name} one of {other}: convert one of them")
    if kind == "numpy":
        return functools.partial(_numpy, device=_device_named(device))
    if device is not None:
        raise ValueError(f"device is {device!r}, but arrays of {kind} are multiplied where they are: leave device out")
    multiply = _MULTIPLY.get(kind)
    if multiply is None:
        from distmm_kernels.arrays import pytorch

        multiply = _MULTIPLY["torch"] = pytorch.multiply
    return multiply


def adjoint(x: Any) -> Any:
    """Return the second operand of `gram`: a transposed view. Its kernels read `x` alone, so nothing is conjugated."""
    kind = kind_of(x)
    if x.ndim < 2:
        raise ValueError(f"a has shape {tuple(x.shape)}: gram multiplies matrices by their transposes; add an axis")
    if kind == "torch":
        return x.mH  # conjugated when it is read, as by gradients
    if kind == "dlpack":
        return x.mT  # the array API standard has no swapaxes
    return _as_numba(view(x).swapaxes(-1, -2)) if kind == "numba" else x.swapaxes(-1, -2)


def _device_named(device: Any) -> Device:
    if isinstance(device, Device):
        return device
    if device is None or device == "cpu":
        return cpu_here()
    kind, _, number = str(device).partition(":")
    if kind not in ("cuda", "gpu") or not (number or "0").isdecimal():
        raise ValueError(f'device is {device!r}: use "cpu", "cuda" or "cuda:1"')
    return on_gpu.device_of(int(number or 0))


@functools.cache
def cpu_here() -> Device:
    """Return this machine's CPU, which is described once."""
    return cpu()


def _numpy(a: Any, b: Any, out: Any, c: Any, options: Options, device: Device) -> Any:
    if device.kind == "cpu":
        made = product(a, b, c, out, device, options)
        return made[()] if out is None and made.ndim == 0 else made
    import cupy

    shape, dtype = result_of(a, b, out)
    with cupy.cuda.Device(device.index):
        there = cupy.empty(shape, dtype)
        left, right, added = (None if x is None else cupy.asarray(x) for x in (a, b, c))
        product(left, right, added, there, device, options)
        return there.get()[()] if out is None else there.get(out=out)


def _cupy(a: Any, b: Any, out: Any, c: Any, options: Options) -> Any:
    return on_gpu.multiply(_cupy_arrays(), a, b, out, c, options)


@functools.cache
def _cupy_arrays() -> on_gpu.GpuArrays:
    import cupy

    return on_gpu.GpuArrays(
        layout=lambda x: (x.shape, x.strides, x.dtype, x.data.ptr & 15, x.data.device_id),
        address=lambda x: x.data.ptr,
        memory=lambda x: x.data.mem.ptr,
        device=lambda x: x.data.device_id,
        current=cupy.cuda.runtime.getDevice,
        stream=lambda _: cupy.cuda.get_current_stream().ptr,
        captured=captured,
        empty=lambda shape, dtype, *_: cupy.empty(shape, dtype),
        view=lambda x: x,
        working=_working,
        library=lambda *_: None,
    )


@contextlib.contextmanager
def _working(index: int) -> Iterator[None]:
    """Make a device CuPy's. A graph has the memory of intermediate results, which CuPy's pool would give away."""
    import cupy

    with cupy.cuda.Device(index), contextlib.ExitStack() as stack:
        if captured():
            stack.enter_context(cupy.cuda.using_allocator(cupy.cuda.malloc_async))
        yield


def view(x: Any) -> Any:
    """Return an array of another package as a NumPy or CuPy array of the same memory."""
    kind = kind_of(x)
    if kind in ("numpy", "cupy"):
        return x
    if kind == "dlpack" and x.__dlpack_device__()[0] not in GPU:
        return np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
    import cupy

    if kind == "numba":
        return cupy.asarray(x)
    if x.dtype == ml_dtypes.bfloat16:  # DLPack of CuPy has no bfloat16
        return cupy.from_dlpack(x.view("int16")).view(ml_dtypes.bfloat16)
    return cupy.from_dlpack(x)


def _as_numba(x: Any) -> Any:
    from distmm_kernels.device_code.emit import cuda

    return cuda.as_cuda_array(x, sync=False)  # the caller goes on in the same stream


def _numba(a: Any, b: Any, out: Any, c: Any, options: Options) -> Any:
    left, right, to, added = (None if x is None else view(x) for x in (a, b, out, c))
    made = _cupy(left, right, to, added, options)
    return _as_numba(made) if out is None else out


def _dlpack(a: Any, b: Any, out: Any, c: Any, options: Options) -> Any:
    if out is not None:
        raise ValueError(f"out is a {type(out).__name__}, which cannot be written: leave out out")
    left, right, added = (None if x is None else view(x) for x in (a, b, c))
    if isinstance(left, np.ndarray):
        return a.__array_namespace__().asarray(_numpy(left, right, None, added, options, cpu_here()))
    made, import_from = _cupy(left, right, None, added, options), a.__array_namespace__().from_dlpack
    if made.dtype == ml_dtypes.bfloat16:
        return import_from(made.view("int16")).view("bfloat16")
    return import_from(made)


_MULTIPLY: dict[str, Multiply] = {"cupy": _cupy, "numba": _numba, "dlpack": _dlpack}

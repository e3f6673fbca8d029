"""Products of arrays in the memory of one GPU. What a call finds out is kept, so that a further one looks it up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from distmm_kernels.arrays.products import Options, kernel_of, product, result_of
from distmm_kernels.device import Device, gpus, why_no_gpu
from distmm_kernels.kernel import Array, Enqueue
from distmm_kernels.launch.bounded import Bounded


class GpuArrays(NamedTuple):
    """What a product needs to know of a package's arrays in GPU memory. A plain call takes a few microseconds.

    Attributes
    ----------
    layout
        Shape, strides, type, the last bits of the address, and device: on these a launch depends.
    address
        Address of the first element.
    memory
        Address of the allocation that has the array.
    device, current
        CUDA's number of an array's device, and of the current one.
    stream
        Handle of the current stream of a device.
    captured
        Whether a CUDA graph captures that stream.
    empty
        Makes the result, from its shape and type and the operands.
    view
        The array as a CuPy array.
    working
        A context in which a device, its current stream and memory of the package are those of CuPy.
    library
        Multiplies two matrices, into a third one if it is given, by the package's own call of cuBLAS, which takes the
        host less time than ours. Returns None where it may give another type, or round more.
    """

    layout: Callable[[Any], tuple[Any, ...]]
    address: Callable[[Any], int]
    memory: Callable[[Any], int]
    device: Callable[[Any], int]
    current: Callable[[], int]
    stream: Callable[[int], int]
    captured: Callable[[], bool]
    empty: Callable[[tuple[int, ...], np.dtype[Any], Any, Any], Any]
    view: Callable[[Any], Array]
    working: Callable[[int], AbstractContextManager[None]]
    library: Callable[[Any, Any, Any], Any]


ALWAYS: Iterator[int] = itertools.repeat(0)


class Direct(NamedTuple):
    """A product that is one launch on the operands as they are. It is forgotten when ``left`` has no more items.

    The package may compute it itself if it is a ``library``'s product of two matrices.
    """

    capturable: bool
    launch: Enqueue
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    left: Iterator[int] = ALWAYS
    library: bool = False


direct: Bounded[Direct | None] = Bounded()
"""By the layout of the operands and the options: the launch, or None if the product needs more than one."""


def multiply(arrays: GpuArrays, a: Any, b: Any, out: Any, c: Any, options: Options) -> Any:
    """Return ``alpha * a @ b + beta * c``, once it is enqueued on the package's current stream.

    Raises
    ------
    ValueError
        If the arrays are on several devices, or their shapes do not match.
    """
    index, layout, address = arrays.device(a), arrays.layout, arrays.address
    apart = c is None and (out is None or arrays.memory(out) not in (arrays.memory(a), arrays.memory(b)))
    key = layout(a), layout(b), None if out is None else layout(out), options
    known = direct.get(key) if apart and arrays.current() == index else None
    if known is not None and (known.capturable or not arrays.captured()):
        made = arrays.library(a, b, out) if known.library else None
        if made is None:
            made = arrays.empty(known.shape, known.dtype, a, b) if out is None else out
            known.launch(address(a), address(b), address(made), arrays.stream(index))
        if next(known.left, None) is None:
            direct.pop(key, None)
        return made
    places = {name: layout(x)[-1] for name, x in {"a": a, "b": b, "c": c, "out": out}.items() if x is not None}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name}: {place}" for name, place in places.items())
        raise ValueError(f"arrays are on several devices ({listed}): copy them to one of them")
    device = device_of(index)
    with arrays.working(index):
        left, right, added = (None if x is None else arrays.view(x) for x in (a, b, c))
        made = arrays.empty(*result_of(left, right, None), a, b) if out is None else out
        target = arrays.view(made)
        product(left, right, added, target, device, options, new=out is None)
        if apart and key not in direct and not arrays.captured():
            _learn(key, left, right, target, device, options)
    return made


def _learn(key: Any, a: Array, b: Array, out: Array, device: Device, options: Options) -> None:
    """Keep the launch of a product, if it is one launch on the operands as they are.

    A kernel with guards may leave products to the library: then its launch is kept for some of them.
    """
    plain = options[:2] == (1, 0) and a.dtype == b.dtype and min(a.ndim, b.ndim) > 1
    if not (plain and out.size and a.size):
        direct[key] = None
        return
    kernel, guarded, building = kernel_of(a, b, out.dtype, device, options)
    if building or kernel.guarded or (guarded is not None and guarded.patience == 0):
        return
    left = ALWAYS if guarded is None else iter(range(guarded.patience - 1))
    launch = kernel.direct(a, b, out, options.symmetry is not None)
    library = kernel.name == "cublas" and a.ndim == b.ndim == 2 and a.dtype == out.dtype
    direct[key] = None if launch is None else Direct(kernel.capturable, launch, out.shape, out.dtype, left, library)


def device_of(index: int) -> Device:
    """Return the GPU with CUDA's number.

    Raises
    ------
    RuntimeError
        If it cannot be used, with the reason.
    """
    devices = gpus()
    if index < len(devices):
        return devices[index]
    raise RuntimeError(why_no_gpu() or f"there is no GPU cuda:{index}: this machine has {len(devices)}")

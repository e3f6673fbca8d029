"""Launch machine code through the CUDA driver, in a few microseconds.

Numba's dispatcher takes 42 us for a launch with nine arguments, most of it for the arguments' types. Here every
argument is 8 bytes or a TMA descriptor, and a launch is one `struct.pack` and one call of the driver.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from distmm_kernels.device import Device
from distmm_kernels.launch.binary import Recipe, binary

PER_THREAD = 2  # CUDA's handle of the default stream that each thread has for itself


def check(status: Any, *answer: Any) -> Any:
    """Return the results of a call of the driver.

    Raises
    ------
    RuntimeError
        If the call failed. The message names the error.
    """
    if status:  # CUDA_SUCCESS is 0
        from cuda.bindings import driver

        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"the CUDA driver answers {status.name}: {text.decode() if text else 'unknown error'}")
    return answer[0] if len(answer) == 1 else answer


@functools.lru_cache(maxsize=256)
def stream_of(handle: int, device: int) -> Any:
    """Return CuPy's object for a stream that another library has made. It does not keep or end the stream."""
    import cupy

    with warnings.catch_warnings():
        # CuPy 14 deprecates this class for Stream.from_external, which ends the stream when its object is collected
        warnings.simplefilter("ignore", DeprecationWarning)
        return cupy.cuda.ExternalStream(handle, device)


class LoadedKernel:
    """A kernel on one device, ready for launches from any thread."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        import cupy
        from cuda.bindings import driver

        if device.compute_capability is None:
            raise ValueError(f"{device} is no GPU: {recipe.maker} runs on CUDA devices only")
        made = binary(recipe, device.compute_capability)
        self.threads, self.shared_bytes = made.threads, made.shared_bytes
        library = check(*driver.cuLibraryLoadData(made.cubin, [], [], 0, [], [], 0))
        (kernel,) = check(*driver.cuLibraryEnumerateKernels(1, library))
        handle = check(*driver.cuDeviceGet(device.index))
        if self.shared_bytes > 48 * 1024:  # more than 48 KiB must be requested for each kernel and device
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(*driver.cuKernelSetAttribute(most, self.shared_bytes, kernel, handle))
        self._function = check(*driver.cuKernelGetFunction(kernel))
        self._launch = driver.cuLaunchKernel
        self._blocks = threading.local()
        self._current_stream = cupy.cuda.get_current_stream

    def launch(self, grid: tuple[int, int, int], values: Sequence[int], stream: int | None = None) -> None:
        """Enqueue one launch. The device must be current, as it is inside ``cupy.cuda.Device``.

        Parameters
        ----------
        grid
            Blocks in x, y and z.
        values
            The arguments, of 8 bytes each: integers, addresses, `array_arguments`.
        stream
            Address of a CUDA stream; CuPy's current one if None.
        """
        try:
            block = self._blocks.block  # one for each host thread; the driver reads it before the launch returns
        except AttributeError:
            block = self._blocks.block = ParameterBlock(0, len(values))
        self.launch_with(grid, block.fill((), values), stream)

    def launch_with(self, grid: tuple[int, int, int], parameters: int, stream: int | None = None) -> None:
        """Enqueue one launch as `launch` does. ``parameters`` is an address that `ParameterBlock.fill` returned.

        The driver copies the parameters, and the TMA descriptors among them, before this returns.
        """
        if stream is None:
            stream = self._current_stream().ptr
        (status,) = self._launch(self._function, *grid, self.threads, 1, 1, self.shared_bytes, stream, parameters, 0)
        if status:
            check(status)


class ParameterBlock:
    """A kernel's parameters, in a buffer that the driver reads: values, then pointers to TMA descriptors and to values.

    One call of `struct` fills it; a ctypes object for each parameter would take 20 us.
    """

    def __init__(self, maps: int, values: int) -> None:
        written = values + maps
        self._buffer = ctypes.create_string_buffer(8 * (written + values))
        first = ctypes.addressof(self._buffer)
        self.address = first + 8 * values
        struct.pack_into(f"{values}q", self._buffer, 8 * written, *range(first, self.address, 8))
        self._put = struct.Struct(f"{written}q").pack_into

    def fill(self, maps: Sequence[int], values: Sequence[int]) -> int:
        """Write the parameters of a launch; return the address of the pointers to them."""
        self._put(self._buffer, 0, *values, *maps)
        return self.address


_lock = threading.Lock()
_loaded: dict[tuple[Recipe, int], LoadedKernel] = {}


def loaded(recipe: Recipe, device: Device) -> LoadedKernel:
    """Return the kernel on a device. The first call in a process loads it from disk, or compiles it."""
    key = recipe, device.index
    kernel = _loaded.get(key)
    if kernel is None:
        with _lock:
            kernel = _loaded.get(key)
            if kernel is None:
                kernel = _loaded[key] = LoadedKernel(recipe, device)
    return kernel


def stream_number(stream: int) -> int:
    """Return the number of a stream of the current device, which no other stream of this process ever has.

    While a CUDA graph captures the stream, the number is -1.

    Parameters
    ----------
    stream
        The handle: an address, 0 or 1 for the default stream, 2 for the calling thread's default stream.
    """
    from cuda.bindings import driver

    # the driver does not tell the number during a capture, and ends the capture if it is asked
    if stream > PER_THREAD and int(check(*driver.cuStreamIsCapturing(stream))):
        return -1
    return int(check(*driver.cuStreamGetId(stream)))


def array_arguments(address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return an array as kernel arguments, for a Numba array with the same number of dimensions in the signature.

    In order: owner of the memory, parent, number of elements, itemsize, address, shape, strides in bytes. This is
    numba-cuda's layout. `distmm_kernels.device_code.emit.check` raises an error if it changes.
    """
    return (0, 0, math.prod(shape), itemsize, address, *shape, *strides)

"""Devices: this machine's CPU, and the NVIDIA GPUs that all needed libraries can use.

Nothing here creates a CUDA context: it only queries the driver for names and sizes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from typing import Any, Literal

# The driver lists the kernels of a library since CUDA 12.4 (cuLibraryEnumerateKernels).
LEAST_DRIVER = 12040
# CUDA 13 cannot compile for older GPUs; CUDA 12 can.
LEAST_FOR_CUDA_13 = (7, 5)


@dataclass(frozen=True)
class Device:
    """A device that kernels run on.

    Attributes
    ----------
    kind
        ``"cpu"`` or ``"cuda"``.
    name
        Model, as the driver or the operating system names it.
    index
        CUDA's number of the GPU; 0 for the CPU.
    memory
        Total memory in bytes.
    compute_capability
        ``(major, minor)`` of a GPU; None for the CPU.
    multiprocessors
        Streaming multiprocessors of a GPU; for the CPU, the cores that this process may use.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    index: int
    memory: int
    compute_capability: tuple[int, int] | None
    multiprocessors: int

    def __str__(self) -> str:
        return self.name if self.kind == "cpu" else f"{self.name} (cuda:{self.index})"


def cpu() -> Device:
    """Describe the CPU of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device("cpu", _cpu_name(), 0, memory, None, cores)


@functools.cache
def _cpu_name() -> str:
    """Read the model name from Linux; platform.processor() returns only the instruction set there."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def gpus() -> tuple[Device, ...]:
    """List the CUDA devices that the driver, CuPy and Numba can all use; empty if there are none."""
    return _found()[0]


def why_no_gpu() -> str | None:
    """Return one sentence that says why no GPU is usable, and the remedy; None if a GPU is usable."""
    return _found()[1]


def current() -> Device:
    """Return CuPy's current device in this thread, or the CPU if no GPU is usable."""
    devices = gpus()
    if not devices:
        return cpu()
    import cupy

    return devices[int(cupy.cuda.runtime.getDevice())]


@functools.cache
def _found() -> tuple[tuple[Device, ...], str | None]:
    """Return the devices, and why there are none. Both are fixed when the driver is initialised."""
    try:
        return _usable_devices(), None
    except _NoGpuError as error:
        return (), str(error)


def _usable_devices() -> tuple[Device, ...]:
    devices, cuda = _driver_devices()
    oldest = min(devices, key=lambda device: device.compute_capability or (0, 0))
    if cuda < LEAST_DRIVER:
        needed = f"{LEAST_DRIVER // 1000}.{LEAST_DRIVER % 1000 // 10}"
        raise _NoGpuError(
            f"GPU found ({oldest.name}), but its driver supports CUDA {cuda // 1000}.{cuda % 1000 // 10}, and the "
            f"kernels need {needed}: install the NVIDIA driver 550 or a later one"
        )
    missing = _missing_library(oldest)
    if missing is not None:
        extra = extra_of(devices, cuda)
        raise _NoGpuError(f"GPU found ({oldest.name}), but {missing}: type pip install '.[{extra}]'")
    # The simulator replaces Numba's CUDA by Python threads. Its kernels do not take CuPy's arrays.
    if _simulated():
        raise _NoGpuError("Numba's CUDA simulator is on: unset NUMBA_ENABLE_CUDASIM to use the GPU")
    return devices


class _NoGpuError(Exception):
    """No NVIDIA GPU or driver is usable; the message is for the user."""


def of_driver() -> tuple[tuple[Device, ...], int]:
    """Return the GPUs that the driver grants this process, whatever else is installed, and its version of CUDA.

    The driver obeys ``CUDA_VISIBLE_DEVICES``. ``/dev/nvidia*`` is not read: some containers with GPUs lack these files.
    """
    try:
        return _driver_devices()
    except _NoGpuError:
        return (), 0


def extra_of(devices: tuple[Device, ...], cuda: int) -> str:
    """Return the extra whose compilers support all of these GPUs, and whose code a driver of this version can load."""
    return "cuda13" if cuda >= 13000 and not any(map(_needs_cuda_12, devices)) else "cuda12"


def _driver_devices() -> tuple[tuple[Device, ...], int]:
    """Return the driver's devices, and the version of CUDA that it supports (12040 for 12.4)."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise _NoGpuError(f"GPUs cannot be searched for ({error}): type pip install numba-cuda") from error

    def ask(call: Any, *arguments: Any) -> Any:
        status, *answer = call(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise _NoGpuError(f"no usable NVIDIA GPU here: {call.__name__} of its driver answered {status.name}")
        return answer[0] if answer else None

    try:
        ask(driver.cuInit, 0)
    except (RuntimeError, OSError) as error:  # libcuda is looked up at the first call
        raise _NoGpuError("no NVIDIA GPU or driver was found on this machine") from error
    attribute = driver.CUdevice_attribute
    devices = []
    for index in range(ask(driver.cuDeviceGetCount)):
        handle = ask(driver.cuDeviceGet, index)
        fact = functools.partial(ask, driver.cuDeviceGetAttribute)
        devices.append(
            Device(
                kind="cuda",
                name=ask(driver.cuDeviceGetName, 256, handle).split(b"\0")[0].decode(),
                index=index,
                memory=int(ask(driver.cuDeviceTotalMem, handle)),
                compute_capability=(
                    fact(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle),
                    fact(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle),
                ),
                multiprocessors=fact(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle),
            )
        )
    if not devices:
        raise _NoGpuError("the NVIDIA driver answers but shows no GPU: is CUDA_VISIBLE_DEVICES empty?")
    return tuple(devices), int(ask(driver.cuDriverGetVersion))


def _simulated() -> bool:
    """Whether Numba's CUDA simulator is on.

    This does not import Numba, which takes half a second and is not needed if all kernels are on disk.
    """
    numba = sys.modules.get("numba")
    if numba is None:
        return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    return bool(numba.config.ENABLE_CUDASIM)


def _needs_cuda_12(device: Device) -> bool:
    return (device.compute_capability or LEAST_FOR_CUDA_13) < LEAST_FOR_CUDA_13


def _missing_library(device: Device) -> str | None:
    """Return why a library that the GPU kernels need does not work, or not on this device; None if all work."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is missing"
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy's own errors and the loader's: CuPy is not usable
        return f"CuPy cannot use it ({error})"
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is missing"
    try:
        from cuda.bindings import nvjitlink, nvvm

        nvvm.version()
        linker, _ = nvjitlink.version()
    except Exception as error:  # the loader raises several types of errors
        return f"the CUDA compiler libraries NVVM and nvJitLink cannot be used ({error})"
    if linker >= 13 and _needs_cuda_12(device):
        major, minor = device.compute_capability or (0, 0)
        return f"the compilers of CUDA {linker} do not know its compute capability {major}.{minor}"
    return None

"""The GPUs of this machine that a cluster can use, found with the CUDA driver only."""

from __future__ import annotations

import ctypes
import importlib.util

# The compilers of CUDA 13 do not support GPUs of a lower compute capability; those of CUDA 12 do.
LEAST_FOR_CUDA_13 = (7, 5)


def _driver() -> ctypes.CDLL | None:
    """Load the CUDA driver's library, if there is one. This module creates no CUDA context: only workers use GPUs."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def gpu_count() -> int:
    """Return the number of CUDA devices that this process can use; 0 without a driver.

    The driver obeys ``CUDA_VISIBLE_DEVICES``. ``/dev/nvidia*`` is not read: some containers with GPUs lack these files.

    Returns
    -------
    int
    """
    driver, count = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def missing_for_gpu() -> str | None:
    """Return why no GPU cluster can be started on this machine.

    Returns
    -------
    str or None
        The reason and the remedy; None if a GPU cluster can be started.
    """
    count = gpu_count()
    if count == 0:
        return "there is no NVIDIA GPU that the driver grants this process"
    absent = [name for name in ("dask_cuda", "cupy", "rmm") if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"{count} GPU(s) found, but not the package(s) {', '.join(absent)}: type pip install '.[{_extra(count)}]'"


def _extra(count: int) -> str:
    """Return the extra whose compilers support all GPUs of this machine, and whose code the driver can load."""
    driver, version = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value < 13000:
        return "cuda12"
    return "cuda12" if min(map(compute_capability, range(count))) < LEAST_FOR_CUDA_13 else "cuda13"


def compute_capability(device: int) -> tuple[int, int]:
    """Return the compute capability of a GPU that `gpu_count` counts."""
    driver, found = _driver(), (ctypes.c_int(0), ctypes.c_int(0))
    for number, attribute in zip(found, (75, 76), strict=True):  # its major and its minor number
        if driver is not None:
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return found[0].value, found[1].value

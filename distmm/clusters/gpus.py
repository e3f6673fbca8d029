"""The GPUs of this machine that a cluster can use, by the CUDA driver alone."""

from __future__ import annotations

import ctypes
import importlib.util

__all__ = ["gpu_count", "missing_for_gpu"]

# The compilers of CUDA 13 know no GPUs of a lower compute capability; those of CUDA 12 do.
LEAST_FOR_CUDA_13 = (7, 5)


def _driver() -> ctypes.CDLL | None:
    """Load the CUDA driver's library, if there is one. Nothing here creates a context: only workers use the GPUs."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def gpu_count() -> int:
    """Count the CUDA devices that the driver grants this process; 0 without a driver.

    The driver is asked, not ``/dev/nvidia*``, which some containers with GPUs do not have; it obeys
    ``CUDA_VISIBLE_DEVICES``.

    Returns
    -------
    int
    """
    driver, count = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def missing_for_gpu() -> str | None:
    """Say in one sentence why a GPU cluster cannot be started here, with the remedy.

    Returns
    -------
    str or None
        None where it can be started.
    """
    count = gpu_count()
    if count == 0:
        return "there is no NVIDIA GPU that the driver grants this process"
    absent = [name for name in ("dask_cuda", "cupy", "rmm") if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return (
        f"{count} GPU(s) found, but not the package(s) {', '.join(absent)}: type pip install 'distmm[{_extra(count)}]'"
    )


def _extra(count: int) -> str:
    """Return the extra whose compilers know all GPUs, and whose code the driver loads."""
    driver, version = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value < 13000:
        return "cuda12"
    found = (ctypes.c_int(0), ctypes.c_int(0))
    for device in range(count):
        for number, attribute in zip(found, (75, 76), strict=True):  # major and minor compute capability
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        if (found[0].value, found[1].value) < LEAST_FOR_CUDA_13:
            return "cuda12"
    return "cuda13"

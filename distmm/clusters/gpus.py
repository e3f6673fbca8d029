"""The GPUs of this machine that a cluster can use, found with the CUDA driver only.

No CUDA context is created: only workers use GPUs.
"""

from __future__ import annotations

import importlib.util

from distmm_kernels import device


def gpu_count() -> int:
    """Return the number of CUDA devices that this process can use; 0 without a driver.

    Returns
    -------
    int
    """
    return len(device.of_driver()[0])


def missing_for_gpu() -> str | None:
    """Return why no GPU cluster can be started on this machine.

    Returns
    -------
    str or None
        The reason and the remedy; None if a GPU cluster can be started.
    """
    gpus, cuda = device.of_driver()
    if not gpus:
        return "there is no NVIDIA GPU that the driver grants this process"
    absent = [name for name in ("dask_cuda", "cupy", "rmm") if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    extra = device.extra_of(gpus, cuda)
    return f"{len(gpus)} GPU(s) found, but not the package(s) {', '.join(absent)}: type pip install '.[{extra}]'"

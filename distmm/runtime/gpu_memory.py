"""The path that older scripts preload; the module is `distmm.worker.gpu_memory`."""

import warnings

from distmm.worker.gpu_memory import dask_setup

__all__ = ["dask_setup"]

warnings.warn(
    "the preload module distmm.runtime.gpu_memory is now distmm.worker.gpu_memory: name that one in your script",
    FutureWarning,
    stacklevel=2,
)

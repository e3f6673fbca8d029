"""Clusters for products: local ones on this machine's GPUs or CPUs, workers from Slurm, and running clusters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distmm.clusters.connection import connect
    from distmm.clusters.gpus import gpu_count, missing_for_gpu
    from distmm.clusters.local_cluster import BLAS_THREADS, cpu_workers, local

__all__ = ["BLAS_THREADS", "connect", "cpu_workers", "gpu_count", "local", "missing_for_gpu"]

_MODULES = {"connect": "connection", "gpu_count": "gpus", "missing_for_gpu": "gpus"}


def __getattr__(name: str) -> Any:
    """Import a name on first use (PEP 562): products without a cluster start none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'local_cluster')}"), name)

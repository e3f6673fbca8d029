"""Clusters that products run on: started here, on the GPUs or CPUs of this machine, or running already."""

from distmm.clusters.connection import connect
from distmm.clusters.gpus import gpu_count, missing_for_gpu
from distmm.clusters.local_cluster import BLAS_THREADS, local

__all__ = ["BLAS_THREADS", "connect", "gpu_count", "local", "missing_for_gpu"]

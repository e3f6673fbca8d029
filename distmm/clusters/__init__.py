"""Clusters for products: local ones on this machine's GPUs or CPUs, workers from Slurm, and running clusters."""

from distmm.clusters.connection import connect
from distmm.clusters.gpus import gpu_count, missing_for_gpu
from distmm.clusters.local_cluster import BLAS_THREADS, cpu_workers, local

__all__ = ["BLAS_THREADS", "connect", "cpu_workers", "gpu_count", "local", "missing_for_gpu"]

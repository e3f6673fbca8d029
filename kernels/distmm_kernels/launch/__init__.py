"""Kernels from source to launch: compiled, kept on disk, loaded, started. Nothing here imports Numba early."""

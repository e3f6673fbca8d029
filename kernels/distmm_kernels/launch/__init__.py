"""Compiling, caching, loading and launching kernels. Numba is imported only when a kernel is compiled."""

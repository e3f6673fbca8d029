"""Products of arrays of this process at once: `matmul`, `gram` and `verify` for PyTorch, CuPy, JAX, Numba and NumPy."""

"""Sizes and index arithmetic of tiles: pure functions, no device and no Numba."""

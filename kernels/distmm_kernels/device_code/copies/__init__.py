"""Kernels that copy operands: realigned, transposed, split."""

"""Reductions of finished blocks on the GPU that made them."""

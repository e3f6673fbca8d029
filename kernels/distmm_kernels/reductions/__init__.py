"""Reductions of finished blocks on the GPU that computed them."""

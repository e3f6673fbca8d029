"""Checks that C is the product of A and B, on the workers: Freivalds' test, sketches of blocks, tolerances."""

"""On the workers: is C the product of A and B? Freivalds' test, sketches of blocks, tolerances."""

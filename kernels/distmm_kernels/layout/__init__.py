"""Memory layouts of matrices on the GPU, and the copies that change them."""

"""What runs on the GPU: kernels, and the instructions that they are made of."""

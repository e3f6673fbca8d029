"""The kernels, one idea a file; ``distmm_kernels.select`` chooses among them."""

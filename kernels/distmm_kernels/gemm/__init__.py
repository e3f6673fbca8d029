"""The kernels, one idea a file; ``distmm_kernels.select`` is the way in."""

"""The ladder of kernels: the teaching programs that distmm grew from, beside NumPy and the kernels of products."""

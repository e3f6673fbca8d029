"""Module paths that preloads of older scripts name; `distmm.worker` has the modules."""

"""The functions that Dask runs on workers, one idea a module, and what their arguments say.

Kernels are imported inside the function bodies: client and scheduler import these modules without Numba and without a
GPU. No function writes into its arguments, because a task may run twice (a retry, a lost result): accumulation in place
would then count a product twice.
"""

"""Dask's own products on distmm: the functions `accelerate` and `accelerated`, and ``python -m distmm.accelerate``.

``distmm.accelerate`` is the function: `distmm` imports it when it is imported, so this package is never imported later,
and never takes the function's place. ``from distmm.accelerate import ...`` finds the package, whatever the order.
"""

from distmm.accelerate.switch import accelerate, accelerated

__all__ = ["accelerate", "accelerated"]

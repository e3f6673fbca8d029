"""Dask's own products on distmm: the functions `accelerate` and `accelerated`, and ``python -m distmm.accelerate``.

The attribute ``distmm.accelerate`` is the function. `distmm` itself imports this package first, so a later import
cannot replace the function by the package. ``from distmm.accelerate import ...`` always finds the package.
"""

from distmm.accelerate.switch import accelerate, accelerated

__all__ = ["accelerate", "accelerated"]

"""The names of Dask that `distmm.accelerate` replaces. No other module refers to them.

Dask's own code looks each of them up when it is called: ``Array.__matmul__``, ``Array.dot`` and ``da.dot`` in
`dask.array.routines`, NumPy's functions of Dask arrays in `dask.array`, and ``svd_compressed``, ``qr`` and ``svd`` in
`dask.array.linalg`. If a program has imported a function by name before (``from dask.array import matmul``), it keeps
Dask's function. Tested with Dask 2026.7.1 and 2026.8.0. If Dask moves a name, the first test to fail is
``tests/distmm/accelerate/test_dask_names.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from dask.array.einsumfuncs import parse_einsum_input

__all__ = ["ORIGINALS", "PLACES", "parse_einsum_input", "put", "take_back"]

# Modules in which Dask, and users, look for each function; the first one defines it.
PLACES = {
    "matmul": ("dask.array.routines", "dask.array"),
    "tensordot": ("dask.array.routines", "dask.array"),
    "einsum": ("dask.array.einsumfuncs", "dask.array"),
    "tsqr": ("dask.array.linalg",),
}

_before: dict[tuple[str, str], Callable[..., Any]] = {}  # the functions that `put` has replaced
# Dask's own functions.
ORIGINALS = {name: getattr(import_module(places[0]), name) for name, places in PLACES.items()}


def put(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Replace Dask's functions of these names, until `take_back`."""
    for name, function in functions.items():
        for place in PLACES[name]:
            module = import_module(place)
            _before.setdefault((place, name), getattr(module, name))
            setattr(module, name, function)


def take_back() -> None:
    """Restore the functions that `put` has replaced."""
    while _before:
        (place, name), function = _before.popitem()
        setattr(import_module(place), name, function)

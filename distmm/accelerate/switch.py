"""`accelerate` and `accelerated`: Dask's products on distmm, and back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from distmm.accelerate import dask_names, functions
from distmm.api.array_types import check_query_planning
from distmm.errors import InputError

__all__ = ["accelerate", "accelerated"]

_changing = threading.Lock()
_by_call = False  # whether accelerate() has been called, and not accelerate(False)
_blocks = 0  # `with` blocks that are open, in all threads


def accelerate(on: bool = True) -> None:
    """Let Dask's own products run on distmm, until ``accelerate(False)``.

    ``A @ B``, ``A.dot(B)`` and `dask.array`'s ``matmul``, ``dot``, ``vdot``, ``tensordot``, ``einsum``,
    ``linalg.tsqr``, and with them ``linalg.svd_compressed``, ``linalg.svd`` and ``linalg.qr``, are then computed by
    distmm: with a `distributed.Client` on its cluster, without one on Dask's local schedulers. Results are lazy arrays
    as before, of the same shape, type and chunks. It holds for the process, and calling it again changes nothing.

    What distmm does not take stays Dask's, without a message:

    - products of fewer operations than ``dask.config.get("distmm.accelerate.min-flops")``, by default 1e8, and
      QR decompositions of a single block;
    - types for which Dask's result is of another type than distmm's: bool and integers of fewer than 64 bits;
    - objects, masked, structured and sparse arrays, unknown or empty chunks;
    - products for which the cluster has no worker, or too little memory for all of their blocks;
    - einsums with `dtype`, `casting` or other options, of one operand or more than two, and those whose results
      Dask would cut into smaller chunks.

    The logger ``distmm.accelerate`` says of each product, at level DEBUG, who computes it and why.

    Parameters
    ----------
    on : bool
        False gives Dask its own functions back.

    Raises
    ------
    InputError
        If Dask's configuration has ``array.query-planning: True``.

    See Also
    --------
    accelerated : For the length of a ``with`` block.

    Notes
    -----
    ``python -m distmm.accelerate script.py`` runs a script with it. A function that was imported by its name before,
    as in ``from dask.array import matmul``, remains Dask's.

    Examples
    --------
    >>> import dask.array as da, distmm
    >>> distmm.accelerate()
    >>> A = da.ones((1000, 800), chunks=400)
    >>> (A @ A.T).name.startswith("distmm")
    True
    >>> distmm.accelerate(False)
    >>> (A @ A.T).name.startswith("distmm")
    False
    """
    global _by_call
    if not isinstance(on, bool):
        raise InputError(f"on is {on!r}: give True, or False to undo it")
    with _changing:
        if on:
            check_query_planning()
        _by_call = on
        _put()


@contextmanager
def accelerated() -> Iterator[None]:
    """Let Dask's own products run on distmm inside of a ``with`` block: see `accelerate`.

    What counts is where an array is made, and not where it is computed. The block holds for all threads, and until the
    last of several blocks has ended.

    Yields
    ------
    None

    Raises
    ------
    InputError
        As in `accelerate`.

    Examples
    --------
    >>> import dask.array as da, distmm
    >>> A = da.ones((1000, 800), chunks=400)
    >>> with distmm.accelerated():
    ...     C = A @ A.T
    >>> C.name.startswith("distmm"), (A @ A.T).name.startswith("distmm")
    (True, False)
    """
    global _blocks
    with _changing:
        check_query_planning()
        _blocks += 1
        _put()
    try:
        yield
    finally:
        with _changing:
            _blocks -= 1
            _put()


def _put() -> None:
    if _by_call or _blocks:
        dask_names.put(functions.REPLACEMENTS)
    else:
        dask_names.take_back()

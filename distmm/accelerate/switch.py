"""`accelerate` and `accelerated`: they switch Dask's products to distmm, and back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from distmm.errors import InputError

_changing = threading.Lock()
_by_call = False  # whether accelerate() was called, and accelerate(False) not since then
_blocks = 0  # `with` blocks that are open, in all threads


def accelerate(on: bool = True) -> None:
    """Let Dask's own products run on distmm, until ``accelerate(False)``.

    ``A @ B``, ``A.dot(B)`` and `dask.array`'s ``matmul``, ``dot``, ``vdot``, ``tensordot``, ``einsum``,
    ``linalg.tsqr``, and with them ``linalg.svd_compressed``, ``linalg.svd`` and ``linalg.qr``, are then computed by
    distmm. If there is a `distributed.Client`, its cluster computes them, otherwise Dask's local schedulers. Results
    are lazy arrays as before, of the same shape, type and chunks. The switch applies to the whole process. A second
    call changes nothing. A client on the host of GPU workers also gets large CuPy results from GPU to GPU; Dask sends
    them through host memory.

    Dask computes the following as before, without a message:

    - products of fewer operations than ``dask.config.get("distmm.accelerate.min-flops")``, by default 1e8, and
      QR decompositions of a single block;
    - on GPUs, batches of products with one chunk along k, if a chunk of C has fewer than 20 times as many operations;
    - types for which Dask's result is of another type than distmm's: bool and integers of fewer than 64 bits;
    - objects, masked, structured and sparse arrays, unknown or empty chunks. An array is taken for what its `meta`
      says: masked elements and sparse blocks in one that says nothing of them are an error when it is computed;
    - products for which the cluster has no worker, or too little memory for all of their blocks;
    - einsums with `dtype`, `casting` or other options, of one operand or more than two, and those whose results
      Dask would cut into smaller chunks.

    For each product, the logger ``distmm.accelerate`` says at level DEBUG whether distmm or Dask computes it. If it is
    Dask, it also says why.

    Parameters
    ----------
    on : bool
        False restores Dask's own functions.

    Raises
    ------
    InputError
        If Dask's configuration has ``array.query-planning: True``.

    See Also
    --------
    accelerated : The same for the duration of a ``with`` block.

    Notes
    -----
    ``python -m distmm.accelerate script.py`` runs a script with it. If a program has imported a function by name
    before (``from dask.array import matmul``), it keeps Dask's function.

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
    from distmm.product.array_types import check_query_planning

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

    An array that is made inside of the block is computed by distmm, even if it is computed after the block. The block
    applies to all threads. If several blocks are open, the switch lasts until the last one ends.

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
    from distmm.product.array_types import check_query_planning

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
    from distmm.accelerate import dask_names, functions
    from distmm.clusters import results

    results.by_tickets(_by_call or _blocks > 0)
    if _by_call or _blocks:
        dask_names.put(functions.REPLACEMENTS)
    else:
        dask_names.take_back()

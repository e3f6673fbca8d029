"""Computing a product into an array that is there: NumPy arrays of this process, Zarr arrays and what is like them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, Future, as_completed, futures_of

from distmm.errors import InputError
from distmm.host import Lent, lend

__all__ = ["check_out", "store", "takes_gpu_blocks", "target"]

Region = tuple[slice, ...]


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], operands: tuple[Any, ...]) -> None:
    """Refuse an array that cannot take the product.

    Raises
    ------
    InputError
        If it has another shape, a type that would change values, is read-only, or shares memory with an operand.
    """
    missing = [name for name in ("shape", "dtype", "__setitem__") if not hasattr(out, name)]
    if missing:
        raise InputError(
            f"out is a {type(out).__name__} without {', '.join(missing)}: give a NumPy array, or an object like a Zarr "
            "array"
        )
    if tuple(out.shape) != shape or not np.can_cast(dtype, out.dtype, "same_kind"):
        raise InputError(
            f"out is {tuple(out.shape)} {out.dtype}, the product {shape} {dtype}: make out like the product"
        )
    if not isinstance(out, np.ndarray):
        return
    if not out.flags.writeable:
        raise InputError("out is read-only: give an array that may be written")
    for name, operand in zip("ABC", operands, strict=False):
        if isinstance(operand, np.ndarray) and np.may_share_memory(operand, out):
            raise InputError(f"out shares memory with {name}, which is read while out is written: use another array")


def target(out: Any, client: Client | None) -> Any:
    """Return what workers write to: the array where they reach it, else None."""
    if not isinstance(out, np.ndarray):
        return out
    return lend(out, client, writable=True) if client is not None else None


def takes_gpu_blocks(to: Any) -> bool:
    """Whether blocks in GPU memory may be assigned to what workers write to."""
    return isinstance(to, Lent)


def store(waves: Iterable[tuple[da.Array, Region | None]], out: Any, to: Any, client: Client | None) -> None:
    """Compute the blocks of a product and write each, as it comes, to its place in `out`.

    The cluster knows of two waves at a time. So the second follows the first without a gap, and neither tasks nor
    blocks of more than two are there, however many there are.

    Parameters
    ----------
    waves : iterable of (dask.array.Array, region)
        Arrays of the product's shape, and which part of each is to be computed; None: all of it.
    out : array
        Of the product's shape.
    to : Any
        What `target` returned: written to by workers; None: blocks come here and are written by this process.
    client : distributed.Client, optional
    """
    running: deque[Future] = deque()
    try:
        for product, region in waves:
            part = product if region is None else product[region]
            if client is None:
                da.store(part, out, regions=region, lock=False)
            elif to is None:
                _receive(part, out if region is None else out[region], client)
            else:
                if len(running) == 2:
                    running.popleft().result()
                running.append(client.compute(da.store(part, to, regions=region, lock=False, compute=False)))
        while running:
            running[0].result()
            running.popleft()
    except BaseException:  # Ctrl-C above all: nothing may write to `out` once this call has ended
        if client is not None:
            client.cancel(list(running), force=True)
        raise


def _receive(product: da.Array, out: Any, client: Client) -> None:
    """Write blocks as they arrive here."""
    regions = dict(zip(np.ndindex(*product.numblocks), da.core.slices_from_chunks(product.chunks), strict=True))
    with client.as_current():
        for future, block in as_completed(futures_of(client.persist(product)), with_results=True):
            out[regions[future.key[1:]]] = block

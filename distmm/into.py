"""Computing a product into an array that is there: NumPy arrays of this process, Zarr arrays and what is like them."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, as_completed, futures_of

from distmm.errors import InputError
from distmm.host import Lent, lend

__all__ = ["check_out", "store", "takes_gpu_blocks", "target"]


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


def store(product: da.Array, out: Any, to: Any, client: Client | None) -> None:
    """Compute the blocks of a product and write each, as it comes, to its place in `out`.

    Parameters
    ----------
    product : dask.array.Array
    out : array
        Of its shape.
    to : Any
        What `target` returned: written to by workers; None: blocks come here and are written by this process.
    client : distributed.Client, optional
    """
    if client is None:
        da.store(product, out, lock=False)
        return
    if to is None:
        regions = dict(zip(np.ndindex(*product.numblocks), da.core.slices_from_chunks(product.chunks), strict=True))
        with client.as_current():
            for future, block in as_completed(futures_of(client.persist(product)), with_results=True):
                out[regions[future.key[1:]]] = block
        return
    future = client.compute(da.store(product, to, lock=False, compute=False))
    try:
        future.result()
    except BaseException:  # Ctrl-C above all: nothing may write to `out` once this call has ended
        client.cancel(future, force=True)
        raise

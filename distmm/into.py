"""Computing a product into an array that is there: NumPy arrays of this process, Zarr arrays and what is like them.

A Dask array holds nothing that could be written to. Given as `out` it becomes the lazy product, as it becomes the lazy
result of `numpy.add(x, y, out=D)`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import dask.array as da
import numpy as np
from dask.array.core import handle_out
from distributed import Client, Future, as_completed, futures_of

from distmm.errors import InputError
from distmm.host import Lent, lend
from distmm.operands import kind_of

__all__ = ["become", "check_out", "store", "takes_gpu_blocks", "target"]

Region = tuple[slice, ...]


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], kind: Literal["numpy", "cupy"], operands: tuple[Any, ...]
) -> None:
    """Refuse an array that cannot take the product.

    Raises
    ------
    InputError
        If it has another shape, a type that would change values, is read-only, or shares memory with an operand; if it
        is a Dask array with blocks of another kind than the product's.
    """
    missing = [name for name in ("shape", "dtype", "__setitem__") if not hasattr(out, name)]
    if missing:
        raise InputError(
            f"out is a {type(out).__name__} without {', '.join(missing)}: give a NumPy array, a Dask array, or an "
            "object like a Zarr array"
        )
    if tuple(out.shape) != shape or not np.can_cast(dtype, out.dtype, "same_kind"):
        raise InputError(
            f"out is {tuple(out.shape)} {out.dtype}, the product {shape} {dtype}: make out like the product"
        )
    if isinstance(out, da.Array) and (given := kind_of(out._meta, "out", chunked=True)) != kind:
        raise InputError(f"out has {given} blocks, A and B have {kind} blocks: make out like the operands")
    if not isinstance(out, np.ndarray):
        return  # a Dask array may even be an operand: what has been made of it keeps its old tasks
    if not out.flags.writeable:
        raise InputError("out is read-only: give an array that may be written")
    for name, operand in zip("ABC", operands, strict=False):
        if isinstance(operand, np.ndarray) and np.may_share_memory(operand, out):
            raise InputError(f"out shares memory with {name}, which is read while out is written: use another array")


def become(out: da.Array, product: da.Array) -> da.Array:
    """Make `out` the lazy `product`, in its own type and chunks: Dask's convention for a Dask array as `out`.

    Nothing is computed or copied. What `out` was is forgotten, and freed on the cluster if nobody else needs it.
    """
    handle_out(out, product.astype(out.dtype, copy=False).rechunk(out.chunks))
    return out


def target(out: Any, client: Client | None) -> Any:
    """Return what workers write to: the array where they reach it, else None."""
    if not isinstance(out, np.ndarray):
        return out
    return lend(out, client, writable=True) if client is not None else None


def takes_gpu_blocks(to: Any) -> bool:
    """Whether blocks in GPU memory may be assigned to what workers write to."""
    return isinstance(to, Lent)


def store(waves: Iterable[tuple[da.Array, Sequence[Region | None]]], out: Any, to: Any, client: Client | None) -> None:
    """Compute the blocks of a product and write each, as it comes, to its place in `out`.

    The cluster knows of two waves at a time. So the second follows the first without a gap, and neither tasks nor
    blocks of more than two are there, however many there are.

    Parameters
    ----------
    waves : iterable of (dask.array.Array, regions)
        Arrays of the product's shape, and which parts of each are to be computed; None: all of it.
    out : array
        Of the product's shape.
    to : Any
        What `target` returned: written to by workers; None: blocks come here and are written by this process.
    client : distributed.Client, optional
    """
    running: deque[list[Future]] = deque()  # of each wave: one future for each of its regions
    try:
        for product, regions in waves:
            parts = [product if region is None else product[region] for region in regions]
            if client is None:
                da.store(parts, [out] * len(parts), regions=list(regions), lock=False)
            elif to is None:
                _receive(parts, [out if region is None else out[region] for region in regions], client)
            else:
                if len(running) == 2:
                    client.gather(running.popleft())
                pairs = zip(parts, regions, strict=True)
                stored = [da.store(part, to, regions=region, lock=False, compute=False) for part, region in pairs]
                running.append(client.compute(stored))
        while client is not None and running:
            client.gather(running[0])
            running.popleft()
    except BaseException:  # Ctrl-C above all: nothing may write to `out` once this call has ended
        if client is not None:
            client.cancel([future for wave in running for future in wave], force=True)
        raise


def _receive(parts: list[da.Array], outs: list[Any], client: Client) -> None:
    """Write blocks as they arrive here."""
    places = {
        (part.name, *index): (out, region)
        for part, out in zip(parts, outs, strict=True)
        for index, region in zip(np.ndindex(*part.numblocks), da.core.slices_from_chunks(part.chunks), strict=True)
    }
    with client.as_current():
        for future, block in as_completed(futures_of(client.persist(parts)), with_results=True):
            out, region = places[future.key]
            out[region] = block

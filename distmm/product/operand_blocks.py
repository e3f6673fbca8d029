"""Operands as Dask arrays whose chunks are the plan's blocks, and as one block that a product task loads itself."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array

from distmm.graph.block_arrays import transposed
from distmm.product.arrays_in_graphs import inline_array, lent, rechunked
from distmm.product.operand import Operand, swapped
from distmm.product.users_blocks import Chunks
from distmm.transfer import share
from distmm.worker.tasks import loads
from distmm.worker.tasks.arrivals import Form, arrived_at

if TYPE_CHECKING:
    from distributed import Client  # imported late: products without a cluster use this module, too


def blocked(
    operand: Operand,
    chunks: Chunks,
    device: Literal["cpu", "cuda"],
    client: Client | None = None,
    noted: bool = False,
    name: str = "",
) -> da.Array:
    """Return an operand as a Dask array with exactly these chunks. Tasks load its blocks to `device`.

    Workers of `client` on this machine read a NumPy or CuPy array from the client's memory. If their GPUs do not
    reach a CuPy array, they read a copy in host memory. An array with gaps between the elements of its rows and of
    its columns is copied first. With `noted`, load tasks record checksums (`distmm.transfer.loaded_blocks`).
    An array that is no Dask array becomes one of this `name`, by default a new one.
    """
    if operand.in_memory:
        # For any size and any cluster: an array in memory is always read when the product is computed.
        source = operand.for_later().source
        loan = f"distmm-client-{uuid.uuid4().hex}"
        source = source.swapaxes(-1, -2) if operand.transposed else source
        meta = meta_from_array(source if operand.kind == "cupy" else None, source.ndim, source.dtype)
        device = "cuda" if operand.kind == "cupy" else device
        shared = None if client is None else share(source, client, loan)
        if shared is None and client is not None and operand.kind == "cupy":
            shared = share(source.get(), client, loan)
        if shared is not None:
            return _loaded(shared, chunks, device, name or loan, noted, meta)
        return inline_array(source, chunks, device, name or loan, meta)
    source, own = operand.source, swapped(chunks, operand.transposed)
    if isinstance(source, da.Array):
        source = source if client is None else lent(source, client)
        array = rechunked(source, own)
        array = uploaded(array) if device == "cuda" and operand.kind == "numpy" else array
    else:
        meta = np.empty((0,) * len(source.shape), source.dtype)
        # A new name for each call: Dask's token would read all of the data.
        name = name or f"distmm-load-{uuid.uuid4().hex}"
        array = _loaded(source if operand.file is None else operand.file, own, device, name, noted, meta)
    return array.swapaxes(-1, -2) if operand.transposed else array


def arriving(
    operand: Operand, chunks: Chunks, device: Literal["cpu", "cuda"], client: Client | None
) -> tuple[da.Array, Form]:
    """Return what `blocked` does, its transpose or the vector that it is made from, and which of them it is.

    A transpose or a reshape that Dask makes costs a task for each block. Product tasks do it themselves.
    """
    if operand.vector is not None:
        own = swapped(chunks, operand.transposed)[-1:]
        return blocked(Operand(operand.vector, operand.name, operand.kind), own, device, client), "vector"
    is_lazy = isinstance(operand.source, da.Array)
    inner = transposed(operand.source) if is_lazy else None
    if operand.transposed and inner is not None:  # X of ``gemm(1, X.T, B, transa=True)``
        return blocked(replace(operand, source=inner, transposed=False), chunks, device, client), "matrix"
    inner = operand.source if operand.transposed and is_lazy else inner
    if inner is None or inner.ndim > 2:
        return blocked(operand, chunks, device, client), "matrix"
    return blocked(replace(operand, source=inner, transposed=False), chunks[::-1], device, client), "transpose"


def load(operand: Operand, device: Literal["cpu", "cuda"], client: Client | None) -> loads.Load | None:
    """Return an array of this process as one block that a task reads while the caller keeps the array alive.

    None if it is another array, or if workers do not reach it.
    """
    if client is None or not operand.in_memory:
        return None
    shared = share(operand.source.swapaxes(-1, -2) if operand.transposed else operand.source, client)
    return None if shared is None else loads.Load(shared, "cuda" if operand.kind == "cupy" else device)


def _loaded(source: Any, chunks: Chunks, device: Literal["cpu", "cuda"], name: str, noted: bool, meta: Any) -> da.Array:
    """Return an array-like as a Dask array. A task reads each block when it is needed."""
    load_block = partial(loads.load, device=device, noted=noted)
    return da.from_array(source, chunks=chunks, name=name, getitem=load_block, inline_array=True, meta=meta)


def uploaded(array: da.Array) -> da.Array:
    """Copy each NumPy block once to the GPU of its home worker. Products and transfers between GPUs use that copy."""
    return array.map_blocks(loads.to_device, dtype=array.dtype, meta=array, name=f"distmm-upload-{uuid.uuid4().hex}")


def checked(array: da.Array, name: str) -> da.Array:
    """Return a user's Dask array for other tasks than products, which do not check the blocks that arrive."""
    what = f"a block of {name}"
    return array.map_blocks(arrived_at, what, array.chunks, array.dtype, dtype=array.dtype, meta=array)

"""NumPy and CuPy arrays of this process as Dask arrays, and in the graphs of Dask arrays.

`inline_array` puts an array into a graph: each block is a view, which is read when the graph is sent or run.
`dask.array.from_array` would copy a NumPy array at the call. Workers read large arrays from the client's memory when
the product is computed. Arrays inside the graph are small, or on a cluster whose workers cannot read that memory. They
must be read at the same time.

`lent` is for the arrays of `dask.array.from_array`, whose elements Dask has in its graph. It would send them through
the scheduler, which takes a second for a gigabyte. Workers read large ones in this process's memory instead.
`array_behind` finds the array in such a graph, also if it is in a file.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import dask.array as da
import numpy as np
from dask.array.core import getter, getter_nofancy
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer
from dask.layers import ArraySliceDep

from distmm.graph.block_arrays import one_per_block
from distmm.graph.dask_tasks import Task, TaskRef
from distmm.product.array_types import package_of
from distmm.transfer import ClientArray, has_gaps, share
from distmm.worker import gpu_copies
from distmm.worker.tasks.arrivals import arrived
from distmm.worker.tasks.loads import load, to_device

if TYPE_CHECKING:
    from distributed import Client


@dataclass(frozen=True)
class _Part:
    """A view of a part of an array. Its elements are pickled when the graph is sent."""

    name: str
    array: Any = field(repr=False)

    def __dask_tokenize__(self) -> str:
        return self.name  # not of the elements, which may change

    def __reduce__(self) -> tuple[Any, ...]:
        return _Part, (self.name, gpu_copies.to_host(self.array))  # the scheduler, which unpickles it, may have no GPU


def _loaded(part: _Part, device: Literal["cpu", "cuda"]) -> Any:
    """Return a block on the device. Runs on workers."""
    return to_device(part.array) if device == "cuda" else arrived(part.array, "a block of an operand")


def inline_array(
    array: Any, chunks: tuple[tuple[int, ...], ...], device: Literal["cpu", "cuda"], name: str, meta: Any
) -> da.Array:
    """Return an array of this process as a Dask array with this name. Tasks load its blocks to `device`."""
    # A view of a `numpy.memmap` would be pickled as a memmap.
    plain = np.asarray(array) if isinstance(array, np.ndarray) else array
    indices = np.ndindex(*map(len, chunks))
    parts = {
        index: _Part(f"{name}-{index}", plain[where])
        for index, where in zip(indices, da.core.slices_from_chunks(chunks), strict=True)
    }
    blocks = one_per_block(name, partial(_loaded, device=device), parts)
    return da.Array(blocks, name, chunks, meta=meta)


def rechunked(array: da.Array, chunks: tuple[tuple[int, ...], ...]) -> da.Array:
    """Return a Dask array in these chunks. `dask.array.rechunk` does not cut an array whose lengths are all 0."""
    if array.chunks == chunks:
        return array
    # Peer-to-peer rechunking moves a whole operand at once, which no plan counts, and cannot be repeated for each wave.
    return array.rechunk(chunks, method="tasks") if array.size else da.zeros_like(array, chunks=chunks)


def lent(array: da.Array, client: Client) -> da.Array:
    """Return the same Dask array. Its tasks read large NumPy arrays of the graph in the memory of this process."""
    shared: dict[int, ClientArray | None] = {}
    layers = {name: _lent(layer, client, shared) for name, layer in array.dask.layers.items()}
    if not any(shared.values()):
        return array
    return da.Array(HighLevelGraph(layers, array.dask.dependencies), array.name, array.chunks, meta=array)


def array_behind(array: da.Array) -> Any:
    """Return the array of which `dask.array.from_array` has made a Dask array: of NumPy, Zarr, HDF5 or xarray.

    The shape and type of an array in a file may have changed since. None for any other Dask array, and for those of
    which a lock or a function of the user reads parts.
    """
    layer = array.dask.layers.get(array.name)
    if isinstance(layer, Blockwise):
        return _read_in_parts(array, layer)
    if not isinstance(layer, MaterializedLayer) or not array.size:
        return None
    blocks = (layer.mapping.get((array.name, *index)) for index in np.ndindex(*array.numblocks))
    first = layer.mapping.get((array.name, *(0 for _ in array.numblocks)))
    base = getattr(first, "base", None)
    base = first if base is None else base
    if type(base) is not np.ndarray or (base.shape, base.dtype) != (array.shape, array.dtype):
        return None
    places = da.core.slices_from_chunks(array.chunks)
    same = (  # `aliasing.coincide` takes four times as long, and there may be thousands of blocks
        type(block) is np.ndarray and block.__array_interface__ == base[place].__array_interface__
        for block, place in zip(blocks, places, strict=True)
    )
    return base if all(same) else None


def _read_in_parts(array: da.Array, layer: Blockwise) -> Any:
    """Return the array whose parts a layer reads: of Zarr, HDF5 or xarray, or Dask's copy of a memory map."""
    if layer.task.func not in (getter, getter_nofancy) or layer.task.kwargs.get("lock") or len(layer.indices) != 2:
        return None
    (source, _), (parts, _) = layer.indices  # the array, or the key of its task, and a slice for each chunk
    cut = layer.io_deps.get(parts)
    if isinstance(source, TaskRef):
        source = getattr(array.dask.layers.get(source.key), "mapping", {}).get(source.key)
    if not isinstance(cut, ArraySliceDep) or cut.chunks != array.chunks:
        return None
    if type(source) is np.memmap:
        return source.view(np.ndarray)
    return source if package_of(source) in ("zarr", "h5py", "xarray") else None


def _lent(layer: Layer, client: Client, shared: dict[int, ClientArray | None]) -> Layer:
    if not isinstance(layer, MaterializedLayer):
        return layer
    lent = {}
    for key, value in layer.mapping.items():
        if type(value) is np.ndarray and value.ndim > 1 and (part := _lent_part(value, client, shared)) is not None:
            whole = partial(load, index=(slice(None),) * value.ndim, device="cpu")
            lent[key] = Task(key, whole, part)
    mapping = {**layer.mapping, **lent}
    return MaterializedLayer(mapping, layer.annotations, layer.collection_annotations) if lent else layer


def _lent_part(block: Any, client: Client, shared: dict[int, ClientArray | None]) -> ClientArray | None:
    """Describe a block in this process's memory. The blocks of one array have one loan. None if it cannot be lent."""
    base = block.base
    whole = base if isinstance(base, np.ndarray) and base.ndim > 1 and base.flags.c_contiguous else block
    if has_gaps(whole):  # it would be copied
        return None
    if id(whole) not in shared:
        shared[id(whole)] = share(whole, client, f"distmm-client-{uuid.uuid4().hex}")
    loan, address = shared[id(whole)], block.__array_interface__["data"][0]
    return loan and replace(loan, address=address, shape=block.shape, strides=block.strides, dtype=block.dtype)

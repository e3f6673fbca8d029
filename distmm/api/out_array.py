"""Products into an array that the user gives as `out`: a NumPy array, a Zarr array, or an object like one.

Who writes:

- workers, into a NumPy array of this process, if they reach its memory;
- workers, into an array whose ``chunks`` or ``shards`` say what can be written at the same time; no two tasks write to
  one chunk at a time;
- this process, one block after the other, in all other cases: HDF5 datasets, arrays without chunks, memory that the
  workers do not reach.

When a call has ended, by an error or Ctrl-C too, none of its tasks writes into `out` any more. For memory
`distmm.transfer.write_lease` sees to that, for files `distmm.transfer.counted_writes`. One exception: a worker that the
scheduler has lost may still write the chunks of one block to a file.

A Dask array has no memory to write to. Given as `out` it becomes the lazy product, as with `numpy.add(x, y, out=D)`.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import dask
import dask.array as da
import dask.multiprocessing
import numpy as np
from dask.array.core import handle_out
from dask.base import get_scheduler
from distributed import Client, Future, futures_of

from distmm.api.aliasing import overlap, repeats
from distmm.api.array_types import package_of
from distmm.api.operands import kind_of
from distmm.api.waves import Graph, Waves
from distmm.errors import DoesNotFitError, InputError
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.write_units import are_shared, unit_of, whole_units
from distmm.transfer import ClientArray, share
from distmm.transfer.counted_writes import CountedTarget
from distmm.transfer.write_lease import Lease
from distmm.worker.client_output import ClientOutput

__all__ = ["become", "check_out", "check_unit", "fill", "store", "takes_gpu_blocks", "target"]

Region = tuple[slice, ...]
WaveRegions = tuple[da.Array, Sequence[Region | None]]

# Arrays that were still being written when the user interrupted the wait for it: their memory must not be used again.
_given_up: list[np.ndarray] = []


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], kind: Literal["numpy", "cupy"], operands: Mapping[str, Any]
) -> None:
    """Refuse an array that cannot take the product of these operands, given by their names.

    Raises
    ------
    InputError
        If it has another shape, a type that would change values, is read-only, has elements twice, or shares memory
        or storage with an operand; if it is a Dask array with blocks of another kind than the product's.
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
    if isinstance(out, da.Array) and (given := kind_of(out, "out")) != kind:
        raise InputError(f"out has {given} blocks, the operands have {kind} blocks: make out like them")
    if isinstance(out, da.Array):
        return  # it may be an operand, too: arrays that were made of it keep its old tasks
    if (isinstance(out, np.ndarray) and not out.flags.writeable) or getattr(out, "read_only", False):
        raise InputError("out is read-only: give an array that may be written")
    if repeats(out):
        raise InputError(
            f"elements of out are in memory twice (shape {out.shape}, strides {out.strides}): give a copy of it"
        )
    for name, operand in operands.items():
        if overlap(out, operand):
            what = "memory" if isinstance(out, np.ndarray) else "storage"
            raise InputError(f"out shares {what} with {name}, which is read while out is written: use another array")


def check_unit(out: Any, cluster: ClusterSpec) -> None:
    """Refuse chunks, or shards, that no worker has the memory to write.

    Raises
    ------
    DoesNotFitError
        With the figures.
    """
    unit = unit_of(out)
    memory = cluster.memory if cluster.device == "cpu" else cluster.host_memory
    if unit is not None and memory is not None and (nbytes := math.prod(unit) * out.dtype.itemsize) > memory:
        raise DoesNotFitError(
            f"out is written in chunks of {' x '.join(map(str, unit))}, {nbytes / 1e9:.3g} GB each, and a worker has "
            f"{memory / 1e9:.3g} GB free: make out with smaller chunks (or shards)"
        )


def become(out: da.Array, product: da.Array) -> da.Array:
    """Make `out` the lazy `product`, in its own type and chunks: Dask's convention for a Dask array as `out`.

    Nothing is computed or copied. What `out` was is forgotten, and freed on the cluster if nobody else needs it.
    """
    handle_out(out, product.astype(out.dtype, copy=False).rechunk(out.chunks))
    return out


def fill(out: Any, array: da.Array, client: Client | None) -> Any:
    """Compute a lazy array into `out`, and return `out`; a Dask array becomes it."""
    if isinstance(out, da.Array):
        return become(out, array)
    store([(array, [None])], out, target(out, client), client)
    return out


def target(out: Any, client: Client | None) -> Any:
    """Return what tasks write to: the array where they reach it; None if this process is to write.

    Raises
    ------
    InputError
        If Dask is to compute in processes that do not reach the array.
    """
    if client is not None:
        return share(out, client, writable=True) if isinstance(out, np.ndarray) else out if _is_shared(out) else None
    if get_scheduler() == dask.multiprocessing.get and not _is_shared(out):
        raise InputError(
            f"Dask's scheduler is 'processes', and other processes do not write into this {type(out).__name__}: use "
            "scheduler='threads', or a cluster"
        )
    return out


def _is_shared(out: Any) -> bool:
    """Whether several processes may write to different chunks (or shards) of an array at the same time."""
    if package_of(out) == "zarr":
        import zarr

        from distmm.storage.zarr_internals import store_of

        store = store_of(out)
        in_memory = isinstance(store, zarr.storage.FsspecStore) and "memory" in store.fs.protocol
        return not in_memory and not isinstance(store, (zarr.storage.MemoryStore, zarr.storage.ZipStore))
    return unit_of(out) is not None and package_of(out) != "h5py"


def takes_gpu_blocks(to: Any) -> bool:
    """Whether blocks in GPU memory may be assigned to what workers write to."""
    return isinstance(to, ClientArray)


def store(waves: Iterable[WaveRegions], out: Any, to: Any, client: Client | None) -> None:
    """Compute the blocks of a product and write each to its region of `out` when it is made.

    The cluster knows of two waves at a time: the second one follows the first without a gap, and memory does not grow
    with the number of waves.

    Parameters
    ----------
    waves : iterable of (dask.array.Array, regions)
        Arrays of the product's shape, and which parts of each are to be computed; None: all of it.
    out : array
        Of the product's shape.
    to : Any
        What `target` returned: written to by tasks; None: blocks come here and are written by this process.
    client : distributed.Client, optional
    """
    if isinstance(to, ClientArray):
        assert client is not None
        leased = replace(to, lease=Lease.begin())
        try:
            Waves(client, _raise_error).run(_written_by_workers(waves, out, ClientOutput(leased), client))
        finally:
            _end_lease(leased, out)
    elif client is None:
        _write_by_threads(waves, out, to)
    elif to is None:
        _write_here(waves, out, client)
    else:
        counted = CountedTarget(to)
        Waves(client, _raise_error, run=counted.run).run(_written_by_workers(waves, out, counted, client))


def _end_lease(leased: ClientArray, out: np.ndarray) -> None:
    """Wait until nobody writes into the memory of `out` any more."""
    assert leased.lease is not None
    try:
        leased.lease.end()
    except BaseException as error:
        _given_up.append(out)
        error.add_note("out is not at rest: workers may still write the blocks that they have begun")
        raise


def _written_by_workers(waves: Iterable[WaveRegions], out: Any, to: Any, client: Client) -> Iterator[Graph]:
    """Graphs whose tasks write the waves.

    Where waves, or the parts of one, share chunks of `out`, one part is written after the other.
    """
    unit = unit_of(out)
    for product, regions in waves:
        parts, places = _parts(product, regions, out)
        if unit is None or not any(are_shared(place, product.shape, unit) for place in places):
            yield partial(_send, client, parts, to, places, math.inf)
            continue
        yield from _one_after_another(client, parts, to, places)


def _one_after_another(client: Client, parts: list[da.Array], to: Any, places: list[Region]) -> Iterator[Graph]:
    """Graphs of the parts of one wave; what one has made is there for the next one."""
    kept: list[da.Array] = []

    def send(number: int) -> tuple[list[Future], float]:
        if not kept:
            kept.extend(client.persist(parts) if len(parts) > 1 else parts)
        return _send(client, [kept[number]], to, [places[number]], 0.0)

    return (partial(send, number) for number in range(len(parts)))


def _send(
    client: Client, parts: list[da.Array], to: Any, places: list[Region], tail: float
) -> tuple[list[Future], float]:
    """Have tasks write parts of a product to their places."""
    writes = [
        da.store(part, to, regions=place, lock=False, compute=False) for part, place in zip(parts, places, strict=True)
    ]
    return client.compute(writes), tail


def _raise_error(write: Future) -> None:
    """Raise the error of a task that writes, if it has failed. Its result is None, and is not asked for."""
    if write.status != "finished":
        write.result()


def _write_by_threads(waves: Iterable[WaveRegions], out: Any, to: Any) -> None:
    """Compute and write with Dask's own scheduler, without a cluster."""
    target = CountedTarget(to)
    lock = unit_of(out) is None and not isinstance(out, np.ndarray)  # without chunks it is written by one at a time
    try:
        for product, regions in waves:
            parts, places = _parts(product, regions, out)
            da.store(parts, [target] * len(parts), regions=places, lock=lock)
    except BaseException:
        target.run.end(None)
        raise


def _write_here(waves: Iterable[WaveRegions], out: Any, client: Client) -> None:
    """Have blocks come to this process, which writes one after the other, and receives the next one meanwhile."""
    regions_of: dict[Any, Region] = {}  # of the blocks in flight, by key

    def send(product: da.Array, regions: Sequence[Region | None]) -> tuple[list[Future], float]:
        parts, places = _parts(product, regions, out)
        for part, place in zip(parts, places, strict=True):
            for index, block in zip(np.ndindex(*part.numblocks), da.core.slices_from_chunks(part.chunks), strict=True):
                regions_of[part.name, *index] = tuple(
                    slice(whole.start + at.start, whole.start + at.stop) for whole, at in zip(place, block, strict=True)
                )
        return futures_of(client.persist(parts)), 0.0

    coming: deque[tuple[Region, concurrent.futures.Future[Any]]] = deque()

    def take(future: Future) -> None:
        coming.append((regions_of.pop(future.key), receiving.submit(future.result)))
        if len(coming) > 1:
            write()

    def write() -> None:
        place, block = coming.popleft()
        out[place] = block.result()

    with concurrent.futures.ThreadPoolExecutor(1) as receiving:
        Waves(client, take).run(partial(send, product, regions) for product, regions in waves)
        while coming:
            write()


def _parts(product: da.Array, regions: Sequence[Region | None], out: Any) -> tuple[list[da.Array], list[Region]]:
    """Return the parts of a product that are to be written, and their places; no two blocks of a part share a chunk."""
    unit, whole = unit_of(out), tuple(slice(0, n) for n in product.shape)
    places = [whole if region is None else region for region in regions]
    parts = [product if region is None else product[region] for region in regions]
    if unit is not None:
        for number, (part, place) in enumerate(zip(parts, places, strict=True)):
            cut = zip(part.chunks, place, unit, strict=True)
            chunks = tuple(whole_units(edges, at.start, size) for edges, at, size in cut)
            if chunks != part.chunks:  # peer-to-peer rechunking would move all of it at once, outside any plan
                parts[number] = part.rechunk(chunks, method="tasks")
    return parts, places

"""Products that are written into the user's `out`: a NumPy array, a Zarr array, or an array-like object.

`distmm.product.out_target` says whether workers or this process write the blocks. Two tasks never write to the same
chunk (or shard) at the same time.

When a call has returned or raised, also after Ctrl-C, its tasks do not write to `out` any more. For memory
`distmm.transfer.write_lease` ensures this, for files `distmm.transfer.counted_writes`. One exception: a worker that
lost its connection to the scheduler may still write the chunks of one block to a file.

A Dask array has no memory to write to. As `out` it becomes the lazy product, as in `numpy.add(x, y, out=D)`.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import dask.array as da
import numpy as np
from dask.array.core import handle_out
from distributed import Client, Future, futures_of

from distmm.graph.consumers import places_along, stored
from distmm.planning.write_units import are_shared, unit_of, whole_units
from distmm.product.array_types import package_of
from distmm.product.chains import Chains
from distmm.product.out_target import takes_gpu_blocks, target
from distmm.product.smaller_plan import memory_full
from distmm.product.waves import SendWave, Waves
from distmm.transfer import ClientArray
from distmm.transfer.counted_writes import CountedTarget
from distmm.transfer.write_lease import Lease
from distmm.worker import gpu
from distmm.worker.client_output import ClientOutput
from distmm.worker.copied_output import InMemoryError
from distmm.worker.gpu_copies import blocks_to_host

Place = TypeVar("Place")
Region = tuple[slice, ...]
WaveRegions = tuple[da.Array, Sequence[Region | None]]

# Arrays that workers may still write, because Ctrl-C interrupted the wait for the writes. They are never freed.
_still_written: list[ClientArray] = []


def become(out: da.Array, product: da.Array) -> da.Array:
    """Make `out` the lazy `product`, as Dask does for a Dask array as `out`. `out` keeps its type and chunks.

    Nothing is computed or copied. The cluster frees the old blocks of `out` if no other array needs them.
    """
    handle_out(out, product.astype(out.dtype, copy=False).rechunk(out.chunks))
    return out


def fill(out: Any, array: da.Array, client: Client | None) -> Any:
    """Compute a lazy array into `out`, and return `out`. A Dask array as `out` becomes the lazy array."""
    if isinstance(out, da.Array):
        return become(out, array)
    to = target(out, client)
    if package_of(array._meta) == "cupy" and not takes_gpu_blocks(out, to):
        array = blocks_to_host(array)
    store(lambda: [(array, [None])], out, to, client)
    return out


def store(waves: Callable[[], Iterable[WaveRegions]], out: Any, to: Any, client: Client | None) -> None:
    """Compute the blocks of a product, and write each finished block to its region of `out`.

    The scheduler has the graphs of at most two waves. The second wave starts as soon as the first one leaves workers
    idle, and memory does not grow with the number of waves.

    Parameters
    ----------
    waves : callable
        Returns an iterable of arrays of the product's shape, and the regions of each that have to be computed. The
        region None is the whole array.
    out : array
        Of the product's shape.
    to : Any
        The result of `target`: tasks write to it. None: blocks are sent to this process, which writes them.
    client : distributed.Client, optional
    """
    if isinstance(to, ClientArray):
        _write_to_memory(partial(_written_by_workers, waves(), out), out, to, client)
    elif client is None:
        _write_by_threads(waves(), out, to)
    elif to is None:
        _write_here(waves(), out, client)
    else:
        counted = CountedTarget(to)
        try:
            Waves(client, _raise_error, run=counted.run).run(_written_by_workers(waves(), out, client, counted))
        except InMemoryError:  # tasks wrote to copies
            _write_here(waves(), out, client)
    gpu.wait_for_current_stream(out)  # this process has written there, and the caller may use another stream


def store_block(chains: Chains, out: Any, to: ClientArray) -> None:
    """Compute a product of one task, which writes to `out`. `to` is that of `store`."""

    def sent(client: Client, output: ClientOutput) -> list[SendWave]:
        task = replace(chains, out=output)
        graph, key = task.graph(None), (task.name, *(0 for _ in task.chunks))
        # Not a generator: the list keeps the graph, and with it copies of operands, until the task has read them.
        return [lambda: (client.get(graph, [key], sync=False), math.inf)]

    _write_to_memory(sent, out, to, chains.client)
    gpu.wait_for_current_stream(out)


def _write_to_memory(
    waves: Callable[[Client, ClientOutput], Iterable[SendWave]], out: Any, to: ClientArray, client: Client | None
) -> None:
    """Have workers write to memory of this process. When this returns or raises, no worker writes there any more.

    `waves` takes what they write to.
    """
    assert client is not None
    assert to.loan is not None
    lease = Lease.begin()
    leased = replace(to, lease=lease)
    try:
        Waves(client, _raise_error).run(waves(client, ClientOutput(leased)))
    finally:
        try:
            lease.end()
        except BaseException as error:
            _still_written.append(leased)
            error.add_note("do not use out: workers may still write blocks to it")
            raise
    if to.loan.array is not out:  # workers do not reach the memory of `out`, and have written to other memory
        out[...] = to.loan.array


def _written_by_workers(waves: Iterable[WaveRegions], out: Any, client: Client, to: Any) -> Iterator[SendWave]:
    """Yield graphs whose tasks write the waves.

    If waves, or the parts of a wave, share chunks of `out`, the parts are written one after the other.
    """
    unit = unit_of(out)
    for product, regions in waves:
        if unit is None:  # memory: blocks are written as they are
            writes = [stored(product, region, to) for region in regions]
            yield partial(_send, client, writes, math.inf)
            continue
        parts, places = _parts(product, regions, out)
        if any(are_shared(place, product.shape, unit) for place in places):
            yield from _one_after_another(client, parts, to, places)
        else:
            writes = [stored(part, None, to, place) for part, place in zip(parts, places, strict=True)]
            yield partial(_send, client, writes, math.inf)


def _one_after_another(client: Client, parts: list[da.Array], to: Any, places: list[Region]) -> Iterator[SendWave]:
    """Yield the graphs of the parts of one wave. The wave is persisted, so that the parts share its blocks."""
    kept: list[da.Array] = []

    def send(number: int) -> tuple[list[Future], float]:
        if not kept:
            kept.extend(client.persist(parts) if len(parts) > 1 else parts)
        return _send(client, [stored(kept[number], None, to, places[number])], 0.0)

    return (partial(send, number) for number in range(len(parts)))


def _send(client: Client, writes: list[da.Array], tail: float) -> tuple[list[Future], float]:
    """Submit tasks that write blocks of a product."""
    return futures_of(client.persist(writes)), tail


def _raise_error(write: Future) -> None:
    """Raise the error of a failed write. The result of a finished one is None, and is not fetched."""
    if write.status != "finished":
        _result(write)


def _result(future: Future) -> Any:
    """Return a future's result. If a worker's memory was full, raise `DeviceMemoryError`, whatever the task raised.

    A MemoryError of this process, which may have no room for a block that it fetches, keeps its type.
    """
    if future.status == "error" and isinstance(error := future.exception(), MemoryError):
        raise memory_full(error) from error
    return future.result()


def _write_by_threads(waves: Iterable[WaveRegions], out: Any, to: Any) -> None:
    """Compute and write with Dask's local scheduler, without a cluster."""
    target = CountedTarget(to)
    lock = unit_of(out) is None and not isinstance(out, np.ndarray)  # without chunks, one thread writes at a time
    try:
        for product, regions in waves:
            parts, places = _parts(product, regions, out)
            da.store(parts, [target] * len(parts), regions=places, lock=lock)
    except BaseException:
        target.run.end(None)
        raise


def _write_here(waves: Iterable[WaveRegions], out: Any, client: Client) -> None:
    """Fetch the blocks, and write them in this process."""

    def sent() -> Iterator[tuple[list[da.Array], dict[Any, Region]]]:
        for product, regions in waves:
            parts, places = _parts(product, regions, out)
            region_of: dict[Any, Region] = {}
            for part, place in zip(parts, places, strict=True):
                along = places_along(part.chunks, tuple(at.start for at in place))
                keys = ((part.name, *index) for index in np.ndindex(*part.numblocks))
                region_of.update(zip(keys, itertools.product(*along), strict=True))
            yield parts, region_of

    receive(sent(), out.__setitem__, client, 0.0)


def receive(
    waves: Iterable[tuple[Sequence[Any], Mapping[Any, Place]]],
    take: Callable[[Place, Any], object],
    client: Client,
    tail: float,
) -> None:
    """Compute waves of blocks, and pass them to this process one by one. The next one is fetched meanwhile.

    Parameters
    ----------
    waves : iterable of (collections, dict)
        The blocks of each wave, as Dask collections. The dict says where each of them belongs, by its key.
    take : callable
        Takes where a block belongs, and the block.
    client : distributed.Client
    tail : float
        As in `distmm.product.waves.SendWave`.
    """
    place_of: dict[Any, Place] = {}  # of the blocks in flight
    coming: deque[tuple[Place, concurrent.futures.Future[Any]]] = deque()

    def send(blocks: Sequence[Any], places: Mapping[Any, Place]) -> tuple[list[Future], float]:
        place_of.update(places)
        return futures_of(client.persist(list(blocks))), tail

    def fetch(future: Future) -> None:
        coming.append((place_of.pop(future.key), fetching.submit(_result, future)))
        if len(coming) > 1:
            take_first()

    def take_first() -> None:
        place, block = coming.popleft()
        take(place, block.result())

    with concurrent.futures.ThreadPoolExecutor(1) as fetching:
        Waves(client, fetch).run(partial(send, *wave) for wave in waves)
        while coming:
            take_first()


def _parts(product: da.Array, regions: Sequence[Region | None], out: Any) -> tuple[list[da.Array], list[Region]]:
    """Return the parts of a product to write, and their places in `out`. No two blocks of a part share a chunk."""
    unit, whole = unit_of(out), tuple(slice(0, n) for n in product.shape)
    places = [whole if region is None else region for region in regions]
    parts = [product if region is None else product[region] for region in regions]
    if unit is not None:
        for number, (part, place) in enumerate(zip(parts, places, strict=True)):
            cut = zip(part.chunks, place, unit, strict=True)
            chunks = tuple(whole_units(edges, at.start, size) for edges, at, size in cut)
            # Peer-to-peer rechunking would move all blocks at once. The plan has no memory for that.
            if chunks != part.chunks:
                parts[number] = part.rechunk(chunks, method="tasks")
    return parts, places

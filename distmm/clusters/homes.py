"""Where the chunks of Dask arrays are: the ranks that hold persisted chunks, or what lazy chunks are made from."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.highlevelgraph import MaterializedLayer
from dask.utils import ensure_dict
from distributed import Client, Future, Scheduler
from distributed.metrics import time

from distmm.clusters import view
from distmm.graph.dask_tasks import needs
from distmm.planning.layout import Ints
from distmm.planning.owners import Homes
from distmm.scheduler import dask_internals
from distmm.scheduler.plugin import PlacementPlugin

if TYPE_CHECKING:
    import dask.array as da  # schedulers load this module, too, and need no Dask arrays
    from distributed.scheduler import TaskState

# Seconds in which the scheduler has heard of chunks that a client has just persisted: it orders their tasks first.
KNOWN_SECONDS = 2.0

# Tasks that are looked at for one array, and by the scheduler for one product. A graph with more takes longer to read
# than its homes gain.
MOST_TASKS = 200_000


def chunk_homes(client: Client, arrays: Sequence[da.Array | None], workers: int) -> list[Homes | None]:
    """Return the rank that holds each chunk of two-dimensional arrays, or most of what the chunk is made from.

    Asks the scheduler once, if an array is made from persisted chunks and something has changed. For finished
    chunks, an answer of the last seconds is enough: if a chunk has moved since, the plan is slower, but right.

    Parameters
    ----------
    client : distributed.Client
    arrays : sequence of dask.array.Array or None
    workers : int
        Ranks of the plan. What other workers hold counts as held by none.

    Returns
    -------
    list of Homes or None
        -1 for a chunk that no worker holds anything of. None for arrays that are made from nothing in memory.
    """
    parts = [{} if array is None else persisted_parts(array) for array in arrays]
    futures = {future.key: future for each in parts for held in each.values() for future in held}
    if not futures:
        return [None] * len(arrays)
    # A future that came by pickle, as in an argument of a task, has no status until Dask binds it to a client.
    keys, still = tuple(futures), all(future.status == "finished" for future in futures.values())
    found = view.on_scheduler(client, _holders, keys, old=still)  # finished chunks seldom move
    # Of several holders of a chunk, the one that holds the fewest bytes counts: a worker that has copies of all chunks,
    # to concatenate them perhaps, soon drops them. If they hold the same, chunks are shared out.
    given: Counter[int] = Counter()
    total: Counter[int] = Counter()
    sizes, holders = {}, {}
    for key, (nbytes, ranks) in zip(keys, found, strict=True):
        sizes[key], holders[key] = nbytes, [rank for rank in ranks if rank < workers]
        for rank in holders[key]:
            total[rank] += nbytes
    homes: list[Homes | None] = []
    for array, held in zip(arrays, parts, strict=True):
        if array is None or not held:
            homes.append(None)
            continue
        at = np.full(array.numblocks, -1, np.int64)
        for index, made_from in held.items():
            bytes_at: Counter[int] = Counter()
            for future in made_from:
                for rank in holders[future.key]:
                    bytes_at[rank] += max(1, sizes[future.key])
            if bytes_at:
                best = min(bytes_at, key=lambda rank: (-bytes_at[rank], total[rank], given[rank], rank))
                at[index] = best
                given[best] += bytes_at[best]
        homes.append(tuple(map(tuple, at.tolist())))
    return homes


def persisted_parts(array: da.Array) -> dict[tuple[int, ...], list[Future]]:
    """Return the persisted chunks that each chunk is made from, those that the fewest tasks are away.

    ``X - X.mean(0)`` reads all of X. But chunk i of it is nearest to chunk i of X, and the mean is small.
    """
    if not (futures := futures_in(array)):
        return {}
    graph: Mapping[Any, Any] = ensure_dict(array.dask)
    found, left = {}, MOST_TASKS
    for index in np.ndindex(array.numblocks):
        level: Iterable[Any] = [(array.name, *index)]
        seen = set(level)
        while level and left > 0:
            if nearest := [futures[key] for key in level if key in futures]:
                found[index] = nearest
                break
            left -= len(seen)
            level = {need for key in level for need in needs(graph, key)} - seen
            seen |= level
    return found


def futures_in(array: da.Array) -> dict[Any, Future]:
    """Return the futures of a graph, by their keys. No layer makes its tasks for it, as for Dask's `futures_of`."""
    layers = (layer.mapping for layer in array.dask.layers.values() if isinstance(layer, MaterializedLayer))
    return {key: value for tasks in layers for key, value in tasks.items() if isinstance(value, Future)}


def homes_of_blocks(
    homes: Homes | None, chunks: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]
) -> Homes | None:
    """Return the rank that holds most of each block, for blocks with the edges `cuts` of an array with `chunks`."""
    if homes is None or tuple(map(tuple, chunks)) == tuple(map(tuple, cuts)):
        return homes
    at = np.array(homes)
    down, across = (_overlaps(chunk, cut) for chunk, cut in zip(chunks, cuts, strict=True))
    ranks = range(int(at.max()) + 1)
    if not len(ranks):
        return None
    held = np.array([down @ (at == rank) @ across.T for rank in ranks])
    most = np.where(held.max(axis=0) > 0, held.argmax(axis=0), -1)
    return tuple(map(tuple, most.tolist()))


def _overlaps(chunks: Sequence[int], cuts: Sequence[int]) -> Ints:
    """Elements that each block shares with each chunk ``(blocks, chunks)``."""
    starts, ends = ([np.cumsum(edges) - edges for edges in (chunks, cuts)], [np.cumsum(e) for e in (chunks, cuts)])
    return np.maximum(np.minimum(ends[1][:, None], ends[0]) - np.maximum(starts[1][:, None], starts[0]), 0)


async def _holders(keys: tuple[Any, ...], dask_scheduler: Scheduler) -> list[tuple[int, list[int]]]:
    """Return the bytes of each key, and the ranks that hold it, make it or hold most of what it is made from.

    Chunks that clients keep and that are in Dask's queue get a worker now. Otherwise nobody knows where they will be,
    and nearly all of them would be elsewhere. Runs on the scheduler.
    """
    known, until = dask_scheduler.tasks, time() + KNOWN_SECONDS
    while time() < until and not all(key in known for key in keys):
        await asyncio.sleep(0.01)
    products = dask_scheduler.plugins[PlacementPlugin.name].products
    products.renumber()  # as when the graph of the product arrives
    ranks = products.ranks.alive
    dask_internals.leave_queue(dask_scheduler, [known[key] for key in keys if key in known], list(ranks))
    return [(ts.get_nbytes(), _ranks_of(ts, ranks, len(keys))) if (ts := known.get(key)) else (0, []) for key in keys]


def _ranks_of(ts: TaskState, ranks: Mapping[str, int], chunks: int) -> list[int]:
    """Return the ranks that hold or make a chunk, or else those with most of what it is made from.

    Each of so many `chunks` looks at its share of `MOST_TASKS`. All tasks may be behind each, as in ``X / X.sum()``.
    """
    level, seen = {ts}, {ts}
    while level and len(seen) * chunks <= max(MOST_TASKS, chunks):
        held: Counter[int] = Counter()
        for each in level:
            for ws in each.who_has or ([each.processing_on] if each.processing_on else ()):
                if ws.address in ranks:
                    held[ranks[ws.address]] += each.get_nbytes()
        if held:
            most = max(held.values())
            return sorted(rank for rank, nbytes in held.items() if nbytes == most)
        level = {need for each in level for need in each.dependencies} - seen
        seen |= level
    return []

"""Dask's task classes, and those of distmm's tasks. The only module that imports ``dask._task_spec``.

That module has a private name, and since Dask 2024.12 there is no other way to build tasks. Seen on Dask 2026.7.1 and
2026.8.0; ``tests/distmm/graph/test_dask_tasks.py`` fails first when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import getitem
from typing import Any

from dask._task_spec import Alias, GraphNode
from dask._task_spec import List as List
from dask._task_spec import Task as Task
from dask._task_spec import TaskRef as TaskRef
from dask.core import get_dependencies
from dask.graph_manipulation import chunks

from distmm.graph.placement import Key, Placement
from distmm.planning.plan import Plan
from distmm.worker.tasks import products
from distmm.worker.tasks.largest import topk_of_chunk

# Names of tasks that gather chunks begin with this.
GATHERED = "distmm-gathered-"

# Names of the tasks of Dask's own `store`, and of those of `distmm.graph.consumers`, begin with this.
STORES = "store-map-"


@cache
def _views() -> frozenset[Callable[..., Any]]:
    """Functions that cut blocks."""
    from dask.array.core import getter, getter_inline, getter_nofancy

    return frozenset({getitem, getter, getter_inline, getter_nofancy, products.part})


class SeparateTask(Task):
    """A task that keeps its key through Dask's optimisers: they fuse it with no other task."""

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        """Whether the optimisers have to leave the task as it is."""
        return True


class GatherTask(SeparateTask):
    """A task that copies chunks of a block to one array, where they are."""

    __slots__ = ()


class PlacedTask(SeparateTask):
    """A task whose first argument is its `Placement`, which would be lost inside another task."""

    __slots__ = ()

    @property
    def placement(self) -> Placement:
        """Where the task runs."""
        return self.args[0]


class ProductTask(PlacedTask):
    """One step of a chain, or the sum of two partial blocks of C.

    The plan, and Dask's annotations of the layer, are for the scheduler's plugin, where the tasks are made. Workers do
    not get them.

    Attributes
    ----------
    then : tuple of tasks
        The first of them reads the task's block of C, each other one the result of the one before it (`unfused`).
    """

    __slots__ = ("annotations", "plan", "then")

    def __init__(
        self,
        key: Key,
        func: Callable[..., Any],
        /,
        *args: Any,
        plan: Plan | None = None,
        annotations: Mapping[str, Any] | None = None,
        then: tuple[GraphNode, ...] = (),
        **kwargs: Any,
    ):
        super().__init__(key, func, *args, **kwargs)
        self.plan, self.annotations, self.then = plan, annotations, then

    def __getstate__(self) -> tuple[Any, ...]:
        slots = zip(self.get_all_slots(), super().__getstate__(), strict=True)
        return tuple(None if name in ("annotations", "plan") else value for name, value in slots)

    def __call__(self, values: Any = ()) -> Any:
        """Run the task, and those that follow, with the results that it reads, by key."""
        made = super().__call__(values)
        for task in self.then:
            (read,) = task.dependencies
            made = task({read: made})
        return made

    @property
    def block_fusion(self) -> bool:
        """Whether the optimisers have to leave the task as it is.

        They may make one task of a task that finishes a block of C and the only task that reads the block
        (`Plan.fuses_readers`). If the product task reads a single block, they would also fuse the task that makes that.
        """
        plan, finishes = self.plan, self.key[0] == self.placement.product
        return not (plan is not None and plan.fuses_readers and finishes and len(self.dependencies) > 1)

    @property
    def reads_its_block(self) -> bool:
        """Whether its block of C is gone when it ends: one that follows reads the block, and returns no view of it."""
        return not all(map(is_view, self.then))

    @property
    def is_first(self) -> bool:
        """Whether it begins a chain: it adds to no earlier sum."""
        return self._multiplies and self.args[2] is None

    @property
    def _multiplies(self) -> bool:
        """Whether it is a step of a chain, and not a sum."""
        return self.func in (products.multiply, products.multiply_and_store)

    def operands(self) -> tuple[Key, ...]:
        """Key of every block of A and B that it reads; none for a sum of partial blocks."""
        return tuple(key for blocks in self._blocks for key in _keys(blocks))

    def arrays(self) -> tuple[str | None, ...]:
        """Name of the array of each operand, None if the task reads it itself; none for a sum of partial blocks."""
        return tuple(next((name for name, *_ in _keys(blocks)), None) for blocks in self._blocks)

    @property
    def _blocks(self) -> tuple[Any, ...]:
        return self.args[3:5] if self._multiplies else ()


def _keys(blocks: Any) -> Iterator[Key]:
    """Yield the keys of blocks, some of which may be lists of chunks, or read by the task itself."""
    for block in blocks.args:
        if isinstance(block, TaskRef):
            yield block.key
        elif isinstance(block, List):
            yield from _keys(block)


def needs(graph: Mapping[Any, Any], key: Any) -> frozenset[Any]:
    """Keys that a task of a graph reads; none for a key that the graph does not have."""
    task = graph.get(key)
    if task is None:
        return frozenset()
    return frozenset(task.dependencies if isinstance(task, GraphNode) else get_dependencies(graph, key))


def is_view(task: object) -> bool:
    """Whether a task returns what it reads, or a view of it: the memory stays in use as long as its result does."""
    return isinstance(task, Alias) or (isinstance(task, Task) and task.func in _views())


def is_chunk_of_c(task: object) -> bool:
    """Whether a task cuts a user's chunk of C from a block."""
    return isinstance(task, PlacedTask) and task.func is products.part


def unfused(task: Any) -> Any:
    """Return a product task for a task that Dask has fused from one and its readers; any other task as it is.

    The scheduler's plugin then finds its placement. The readers become `ProductTask.then`.
    """
    if type(task) is not Task or not task.args or type(task.args[0]) is not dict:
        return task
    tasks = list(task.args[0].values())
    if not tasks or not isinstance(made := tasks[0], ProductTask):
        return task
    then = tuple(map(faster, tasks[1:]))
    return ProductTask(
        task.key, made.func, *made.args, plan=made.plan, annotations=made.annotations, then=then, **made.kwargs
    )


def faster(task: GraphNode) -> GraphNode:
    """Return a task that reads a block of C: the same one, or one with a faster function."""
    if not isinstance(task, Task) or not isinstance(given := task.func, partial):
        return task
    from dask.array.chunk import topk

    if given.func is not topk:
        return task
    return Task(task.key, partial(topk_of_chunk, *given.args, **given.keywords), *task.args, **task.kwargs)


def stores(key: object) -> bool:
    """Whether a task writes a block of C: with ``out=``, or by Dask's own `store`, as ``C.to_zarr`` does."""
    return isinstance(key, tuple) and str(key[0]).startswith(STORES)


def renamed(key: Any, names: Mapping[str, str]) -> Any:
    """Return a key with the new name of its array."""
    return (names.get(key[0], key[0]), *key[1:]) if isinstance(key, tuple) else names.get(key, key)


def copied(task: GraphNode, names: Mapping[str, str], blocker: Any = None) -> GraphNode:
    """Return a copy of a task for arrays that have new names. If it reads none of these, it waits for `blocker`."""
    key = renamed(task.key, names)
    reads = {old: new for old in task.dependencies if (new := renamed(old, names)) != old}
    if isinstance(task, Alias):
        task = Alias(key, reads.get(task.target, task.target))
    else:
        task = task.substitute(reads, key=key)
    waits = blocker is not None and not reads
    if isinstance(task, PlacedTask):
        where, argument, *others = task.args
        where = replace(where, product=names.get(where.product, where.product), run=names.get(where.run, where.run))
        argument = Task(None, chunks.bind, argument, TaskRef(blocker)) if waits else argument
        more = {"plan": task.plan, "annotations": task.annotations} if isinstance(task, ProductTask) else {}
        return type(task)(key, task.func, where, argument, *others, **task.kwargs, **more)
    return Task(key, chunks.bind, task, TaskRef(blocker)) if waits else task


def tree(root: Key, keys: Sequence[Key], most: int, inner: Key) -> Iterator[tuple[Key, List, int | None]]:
    """Yield the tasks of a tree that joins results in their order, leaves first: its shape follows from their number.

    Parameters
    ----------
    root : tuple
        Key of the task that joins all.
    keys : sequence of tuple
        Of the results, at least one.
    most : int
        Number of results that a task reads.
    inner : tuple
        Keys of the other tasks begin with this.

    Yields
    ------
    key : tuple
    read : List
    first : int or None
        For a leaf, which reads results of `keys`: the position of the first one.
    """
    level = 0
    while True:
        starts = range(0, len(keys), most)
        own = [root] if len(starts) == 1 else [(*inner, level, number) for number in range(len(starts))]
        for key, start in zip(own, starts, strict=True):
            yield key, List(*map(TaskRef, keys[start : start + most])), None if level else start
        if len(own) == 1:
            return
        keys, level = own, level + 1

"""Slots for blocks of C on each worker, if C does not stay: they bound C's memory even if its readers are slow.

A chain takes a slot on its worker before its first step. It returns the slot when its block of C is released: after the
block has been written to a target, or has been read by the tasks of the user's graph. A worker has slots for the
largest wave, and some more, so that the next wave can start while blocks of this wave are still being written
(`distmm.planning.memory`). Further chains wait: if the target is slow, products wait for it, and memory does not
fill up. Tasks that read blocks of several waves need more slots (`most_at_a_time`): a task such as
those of ``C + C.T`` keeps the first of its blocks until the last one is made, and a worker with fewer slots would wait
for ever.

If the task that finishes a block also reduces it, or is also the task of the user that reads it, the chain returns the
slot when that task ends: the block is gone. If the task's result is lost with its worker, the chain runs again without
a slot. Priorities keep such chains in the order of waves.

There is no deadlock. Each worker has slots for any one wave, and a chain waits only for chains that come before it in
the order of waves. Those never wait for chains that come after them. This also holds if a product is wanted again
while it runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush
from itertools import accumulate, count
from typing import Any, NamedTuple

from distmm.graph.placement import Chain, Key, Placement

Holder = tuple[str, Chain]  # a product, or a reader of its blocks (`OutputSlots.expect`), and a chain

Neighbours = Callable[[Key], Iterable[Key]]


# The first step of a chain that waits for a slot: its priority, which is lower for what starts earlier, a number, its
# key and its place.
Waiting = tuple[tuple[Any, ...], int, Key, Placement]


class OutputSlots:
    """The slots of one run: of a product, or of a job, where each wave is a product of its own.

    Parameters
    ----------
    most : float
        Slots of each worker.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.results: defaultdict[Holder, set[Key]] = defaultdict(set)  # blocks of C, and their mirrors, not yet gone
        # By rank: chains that have a slot, with the orders of their first steps; and these orders, ascending.
        self.taken: defaultdict[int, dict[Holder, int]] = defaultdict(dict)
        self.orders: defaultdict[int, list[int]] = defaultdict(list)
        self.waiting: defaultdict[int, list[Waiting]] = defaultdict(list)  # by rank: a heap of first steps
        self.changed: set[int] = set()  # ranks at which a chain that waits may get a slot
        self.numbers = count()  # if two first steps have one priority, the one that asked first starts first

    def expect(self, key: Key, where: Placement, fused: bool = False, first: bool = False) -> None:
        """Note a task. It may make a result for which its chain has a slot: a block of C, or its mirror image.

        If it is `fused`, it has the key of a task that reads the block. Several graphs may each have such a task for
        one block. If these are also the `first` steps, each makes the block, and needs a slot of its own.
        """
        if fused and first:
            self.results[key[0], where.chain].add(key)
        elif fused or key[0] == where.product:
            self.results[where.product, where.chain].add(key)

    def _holder(self, key: Key, where: Placement) -> Holder:
        """Return under which name `expect` has noted a task, or the chain whose first step it is."""
        own = key[0], where.chain
        return own if own in self.results else (where.product, where.chain)

    def ask(self, key: Key, where: Placement, priority: tuple[Any, ...]) -> None:
        """Let the first step of a chain wait for a slot; `admit` says when it has one."""
        heappush(self.waiting[where.rank], (priority, next(self.numbers), key, where))
        self.changed.add(where.rank)

    def admit(self, wanted: Callable[[Key, Placement], object]) -> list[tuple[Key, Placement]]:
        """Return the first steps that get a slot now, except for tasks that are not wanted any more."""
        admitted = []
        for rank in self.changed:
            waiting = self.waiting[rank]
            while waiting:
                _, _, key, where = waiting[0]
                # Chains of later waves do not count: this chain does not wait for them.
                if bisect_right(self.orders[rank], where.order) >= self.most:
                    break
                heappop(waiting)
                if wanted(key, where):
                    # A chain that was given up takes no slot, for nothing would give it back. It may start, for a
                    # client may retry it.
                    if (holder := self._holder(key, where)) in self.results:
                        self._take(rank, holder, where.order)
                    admitted.append((key, where))
        self.changed.clear()
        return admitted

    def leave(self, key: Key, where: Placement) -> None:
        """Note that a task's result is released, or will never be made: a chain that waits may get its slot."""
        holder = self._holder(key, where)
        results = self.results.get(holder)
        if results is None or key not in results:
            return
        results.discard(key)
        if not results:
            del self.results[holder]
            for rank in where.owners:
                self._give_back(rank, holder)
                if self.waiting.get(rank):
                    self.changed.add(rank)

    def require(self, slots: float) -> None:
        """Let each worker have at least so many slots."""
        self.most = max(self.most, slots)
        self.changed.update(rank for rank, waiting in self.waiting.items() if waiting)

    def _take(self, rank: int, holder: Holder, order: int) -> None:
        self._give_back(rank, holder)  # a chain that starts again has one already
        self.taken[rank][holder] = order
        insort(self.orders[rank], order)

    def _give_back(self, rank: int, holder: Holder) -> None:
        order = self.taken[rank].pop(holder, None)
        if order is not None:
            orders = self.orders[rank]
            del orders[bisect_left(orders, order)]


# Slots for the tasks that read a streamed C


class MadeBlock(NamedTuple):
    """The result of one chain, for which the chain needs a slot.

    Attributes
    ----------
    keys : collection of keys
        A block of C, and its mirror image in a symmetric product.
    wave : int
        Number of the wave in which it is made.
    ranks : collection of int
        Workers that need a slot for it: one on each layer of the grid.
    stays : bool
        Whether it stays in memory until the end, or may stay: a client keeps it, or another product reads it.
    is_read : bool
        Whether the task that makes it also reads it, so that it is gone when that task ends.
    """

    keys: Collection[Key]
    wave: int
    ranks: Collection[int]
    stays: bool = False
    is_read: bool = False


def most_at_a_time(made: Collection[MadeBlock], readers: Neighbours, reads: Neighbours) -> int:
    """Return the slots that each worker needs so that a streamed product can end.

    Parameters
    ----------
    made : collection of MadeBlock
    readers : callable
        Tasks that are to run and read the result of a task.
    reads : callable
        Tasks whose results a task reads.
    """
    last = max((each.wave for each in made), default=0)
    ready = _ready({key: each.wave for each in made for key in each.keys}, readers, reads)
    changes: defaultdict[int, Counter[int]] = defaultdict(Counter)  # rank -> wave -> blocks more than before
    for each in made:
        done = [ready[reader] for key in each.keys for reader in readers(key)]
        until = each.wave if each.is_read else last if each.stays else max(each.wave, *done, 0)
        for rank in each.ranks:
            changes[rank][each.wave] += 1
            changes[rank][until + 1] -= 1
    return max((max(accumulate(count for _, count in sorted(each.items()))) for each in changes.values()), default=0)


def reached(keys: Iterable[Key], readers: Neighbours) -> set[Key]:
    """Return these tasks, and all that need their results, directly or not."""
    found = set(keys)
    stack = list(found)
    while stack:
        for reader in readers(stack.pop()):
            if reader not in found:
                found.add(reader)
                stack.append(reader)
    return found


def _ready(made: dict[Key, int], readers: Neighbours, reads: Neighbours) -> dict[Key, int]:
    """Return the wave after which each task that needs blocks of C, directly or not, can be done."""
    ready = dict(made)
    # Task -> tasks that it reads, and that need blocks of C themselves.
    waits = Counter(reader for key in reached(made, readers) for reader in readers(key))
    done = list(made)
    while done:
        for reader in readers(done.pop()):
            if reader in made:
                continue
            waits[reader] -= 1
            if not waits[reader]:
                ready[reader] = max(ready[key] for key in reads(reader) if key in ready)
                done.append(reader)
    return ready

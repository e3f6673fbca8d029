"""The blocks of C that a worker may hold at a time, where finished ones leave it: a bound whatever they wait for.

A chain takes a place on its worker with its first step, and gives it back when the scheduler has let go of its block of
C, which has then been written. There are places for the largest wave, and for some blocks more: as many as are still on
their way while the next wave begins (`distmm.memory.places`). Chains beyond wait: if the way of C is slow, products
wait for it, and memory does not fill up.

No chain waits for ever: each worker has places for any wave, and a chain waits for those alone that come before it, in
the order of waves. These wait for none that come after them, also where a product is wanted again meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from distributed.scheduler import TaskState

from distmm.graph import Chain, Key, Placed, Product

__all__ = ["Places"]

Ranked = tuple[TaskState, int]  # a task and the rank of its worker


class Places:
    """Who has the places of one product.

    Parameters
    ----------
    most : int
        Places of each worker; infinity where blocks do not leave, because a client keeps them, too.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.results: defaultdict[Chain, set[Key]] = defaultdict(set)  # what has not left: blocks and their mirrors
        self.taken: defaultdict[int, dict[Chain, int]] = defaultdict(dict)  # rank -> chains, and orders of their starts
        self.waiting: defaultdict[int, list[TaskState]] = defaultdict(list)  # rank -> first steps

    def expect(self, task: Placed) -> None:
        """Note a task that makes what a chain has in the end, if it is one."""
        where = task.placement
        if task.key[0] == where.product:
            self.results[where.chain].add(task.key)

    def admit(self, tasks: Iterable[Ranked]) -> list[Ranked]:
        """Return those of `tasks`, and of earlier calls, that may begin: all but chains without a place."""
        may: list[Ranked] = []
        for ts, rank in tasks:
            if isinstance(ts.run_spec, Product) and ts.run_spec.is_first:
                self.waiting[rank].append(ts)
            else:
                may.append((ts, rank))
        for rank, waiting in self.waiting.items():
            waiting.sort(key=lambda ts: ts.priority, reverse=True)
            taken = self.taken[rank]
            while waiting:
                where = waiting[-1].run_spec.placement
                if sum(order <= where.order for order in taken.values()) >= self.most:
                    break
                ts = waiting.pop()
                if ts.state != "forgotten":
                    taken[where.chain] = where.order
                    may.append((ts, rank))
        return may

    def leave(self, task: Placed) -> bool:
        """Note that what a task has made is let go, or never made; return whether that gives a place back."""
        chain = task.placement.chain
        results = self.results.get(chain, set())
        if task.key not in results:
            return False
        results.discard(task.key)
        if results:
            return False
        del self.results[chain]
        for taken in self.taken.values():  # of each layer
            taken.pop(chain, None)
        return True

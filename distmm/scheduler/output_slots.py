"""The blocks of C that a worker may hold at a time, where finished ones leave it: a bound whatever they wait for.

A chain takes a place on its worker with its first step, and gives it back when the scheduler has let go of its block of
C, which has then been written. There are places for the largest wave, and for some blocks more: as many as are still on
their way while the next wave begins (`distmm.planning.memory`). Chains beyond wait: if the way of C is slow, products
wait for it, and memory does not fill up.

No chain waits for ever: each worker has places for any wave, and a chain waits for those alone that come before it, in
the order of waves. These wait for none that come after them, also where a product is wanted again meanwhile.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any

from distributed.scheduler import TaskState

from distmm.graph.layer import Chain, Key, Placed, Placement, Product

__all__ = ["Places"]

Holder = tuple[str, Chain]  # a product and one of its chains: a job may make a block again, as another product
Ranked = tuple[TaskState, int]  # a task and the rank of its worker


class Places:
    """Who has the places of one run: of a product, or of a job, each wave of which is a product of its own.

    Parameters
    ----------
    most : int
        Places of each worker.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.results: defaultdict[Holder, set[Key]] = defaultdict(set)  # what has not left: blocks and their mirrors
        # By rank: chains that have a place, with the orders of their starts, and these orders, ascending.
        self.taken: defaultdict[int, dict[Holder, int]] = defaultdict(dict)
        self.orders: defaultdict[int, list[int]] = defaultdict(list)
        # By rank: a heap of first steps by priority, and how many each product has there.
        self.waiting: defaultdict[int, list[tuple[Any, int, TaskState]]] = defaultdict(list)
        self.products: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.changed: set[int] = set()  # ranks where a chain that waits may have got a place
        self.numbers = count()  # of steps of equal priority the one that came first begins first

    def expect(self, task: Placed) -> None:
        """Note a task that makes what a chain has in the end, if it is one."""
        where = task.placement
        if task.key[0] == where.product:
            self.results[_holder(where)].add(task.key)

    def admit(self, tasks: Iterable[Ranked]) -> list[Ranked]:
        """Return those of `tasks`, and of earlier calls, that may begin: all but chains without a place."""
        may: list[Ranked] = []
        for ts, rank in tasks:
            if isinstance(ts.run_spec, Product) and ts.run_spec.is_first:
                heappush(self.waiting[rank], (ts.priority, next(self.numbers), ts))
                self.products[rank][ts.run_spec.placement.product] += 1
                self.changed.add(rank)
            else:
                may.append((ts, rank))
        for rank in self.changed:
            waiting, products = self.waiting[rank], self.products[rank]
            while waiting:
                ts = waiting[0][-1]
                where = ts.run_spec.placement
                if bisect_right(self.orders[rank], where.order) >= self.most:
                    break
                heappop(waiting)
                products[where.product] -= 1
                if not products[where.product]:
                    del products[where.product]
                if ts.state != "forgotten":
                    self._take(rank, _holder(where), where.order)
                    may.append((ts, rank))
        self.changed.clear()
        return may

    def leave(self, task: Placed) -> set[str]:
        """Note that what a task has made is let go, or never made; return the products whose chains wait for that."""
        where, holder = task.placement, _holder(task.placement)
        results = self.results.get(holder, set())
        if task.key not in results:
            return set()
        results.discard(task.key)
        if results:
            return set()
        del self.results[holder]
        freed = {where.grid.owner(where.i, where.j, where.batch, layer) for layer in range(where.grid.layers)}
        for rank in freed:
            self._give_back(rank, holder)
        return self._change(freed)

    def lift(self) -> set[str]:
        """Let all begin: a client keeps blocks of C, which then do not leave. Return the products that waited."""
        self.most = math.inf
        return self._change(set(self.waiting))

    def _change(self, ranks: set[int]) -> set[str]:
        self.changed |= ranks
        return {product for rank in ranks for product in self.products.get(rank, ())}

    def _take(self, rank: int, holder: Holder, order: int) -> None:
        self._give_back(rank, holder)
        self.taken[rank][holder] = order
        insort(self.orders[rank], order)

    def _give_back(self, rank: int, holder: Holder) -> None:
        order = self.taken[rank].pop(holder, None)
        if order is not None:
            orders = self.orders[rank]
            del orders[bisect_left(orders, order)]


def _holder(where: Placement) -> Holder:
    return where.product, where.chain

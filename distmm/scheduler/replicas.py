"""Replicas of blocks of A and B: which rank gets one, and when it is dropped. Pure.

Each block has a home, the rank that loads it or holds it when a product arrives. The home keeps its copy. Every other
rank that multiplies the block gets one replica, which is dropped after the last product task there that was planned to
read it. Products that run at the same time share replicas of the blocks that they share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable

from distmm.graph.placement import Key

Replica = tuple[Key, int]  # a block, and the rank that holds it


class Replicas:
    """Planned uses of the blocks of all products that run."""

    def __init__(self) -> None:
        self.uses: Counter[Replica] = Counter()  # product tasks that still have to read a block at a rank
        self.home: dict[Key, int] = {}
        self.missing: defaultdict[Key, set[int]] = defaultdict(set)  # ranks of open steps that have no replica yet
        self.used_up: dict[Replica, None] = {}  # read for the last time, and not dropped yet

    def settle(self, block: Key, planned: int, holders: Collection[int]) -> None:
        """Give a block a home: of its holders the present home, the planned one or any; else the planned one."""
        if self.home.get(block, planned) not in holders:
            self.home[block] = planned if planned in holders or not holders else min(holders)
        else:
            self.home.setdefault(block, planned)

    def use(self, block: Key, rank: int) -> bool:
        """Plan one more use of a block at a rank; return whether it is the first one there."""
        self.uses[block, rank] += 1
        return self.uses[block, rank] == 1

    def used(self, blocks: Iterable[Key], rank: int) -> None:
        """Note that a task that was planned to read these blocks at a rank has read them, or never will."""
        for block in blocks:
            replica = block, rank
            left = self.uses[replica] - 1
            if left > 0:
                self.uses[replica] = left
                continue
            del self.uses[replica]
            if rank != self.home.get(block):
                self.used_up[replica] = None

    def want(self, replicas: Iterable[Replica]) -> None:
        """Note the replicas that the steps which open now need, except those whose readers have been given up."""
        for block, rank in replicas:
            if (block, rank) in self.uses:
                self.missing[block].add(rank)

    def copies(self, blocks: Iterable[Key], holders: Callable[[Key], Collection[int]]) -> list[Replica]:
        """Return the replicas to make now of those blocks that are in memory somewhere.

        Parameters
        ----------
        blocks : iterable of keys
            Wanted since the last call, or in memory since then.
        holders : callable
            Ranks that hold a block; none for a block that is not in memory.
        """
        made = []
        for block in blocks:
            ranks = self.missing.get(block)
            if ranks is None or not (there := holders(block)):
                continue
            del self.missing[block]
            made += [(block, rank) for rank in ranks if rank not in there and self.uses.get((block, rank))]
        return made

    def drops(self, holders: Callable[[Key], Collection[int]]) -> list[Replica]:
        """Return the replicas to drop: those that have been read for the last time. One copy of a block stays."""
        dropped = []
        left: dict[Key, int] = {}  # copies: the home may be dead, and several replicas may be used up at the same time
        for block, rank in self.used_up:
            if (block, rank) in self.uses:  # planned again meanwhile
                continue
            there = holders(block)
            if rank in there and left.setdefault(block, len(there)) > 1:
                left[block] -= 1
                dropped.append((block, rank))
        self.used_up.clear()
        return dropped

    def forget(self, block: Key) -> None:
        """Forget a block that the scheduler has forgotten."""
        self.home.pop(block, None)
        self.missing.pop(block, None)

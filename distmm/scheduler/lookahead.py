"""The steps of one product that may be under way: what bounds the blocks in memory, whatever the pace of the workers.

Step s + L of a product opens when every chain has finished step s, L being the plan's lookahead. Until then the
scheduler's plugin holds back the loads of that step's blocks, their copies to other workers, and the products.
So blocks of at most L steps are in memory anywhere, while L - 1 steps of inputs travel behind the arithmetic.

An edge of the graph could not say this. An edge from a D would keep that D alive, which doubles C; a tiny token after
each D doubles the tasks; and when a worker is lost, recomputing a block whose token is gone would recompute every chain
up to there, also those whose D is safe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

__all__ = ["Held", "Window"]


@dataclass
class Held:
    """What one step has to wait for its opening: tasks and their ranks, and copies of blocks that its products need."""

    tasks: dict[Hashable, int] = field(default_factory=dict)
    copies: set[tuple[Hashable, int]] = field(default_factory=set)


class Window:
    """Steps of one product by their order: which are open, and what the others hold."""

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self.left: defaultdict[int, set[Hashable]] = defaultdict(set)  # order -> products that are not done
        self.held: defaultdict[int, Held] = defaultdict(Held)

    def add(self, order: int, key: Hashable) -> Held:
        """Note a product of the step `order`; return what waits for its opening."""
        self.left[order].add(key)
        return self.held[order]

    def finish(self, order: int, key: Hashable) -> bool:
        """Note that a product is done, or failed; return whether it was the last one of its step."""
        if key not in self.left.get(order, ()):
            return False
        self.left[order].discard(key)
        if self.left[order]:
            return False
        del self.left[order]
        return True

    def opened(self) -> list[tuple[int, Held]]:
        """Take what no longer has to wait, in the order of steps."""
        first = min(self.left, default=0)
        open_now = sorted(order for order in self.held if order < first + self.lookahead or not self.left)
        return [(order, self.held.pop(order)) for order in open_now]

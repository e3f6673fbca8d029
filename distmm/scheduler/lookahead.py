"""The steps of one product that may be under way: this bounds the blocks of A and B in memory. Pure.

Step s + L of a product opens when every chain has finished step s, where L is the plan's lookahead. Until then the
scheduler holds back the loads of that step's blocks, their copies to other workers, and its product tasks. So at most L
steps have blocks in memory, and the inputs of L - 1 steps travel while the GPUs compute.

Each task is held back once. When a worker dies late in a chain, the chain's earlier steps are computed again, and they
are not held back a second time: the blocks of all these steps may be in memory at once.

Edges of the graph cannot say this. An edge from a partial sum would keep that sum alive, which doubles C. A small token
after each partial sum doubles the number of tasks. It also makes the loss of a worker expensive: to make a block again
whose token is gone, Dask would recompute every chain up to that step, also those whose sums are safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sortedcontainers import SortedDict

from distmm.graph.placement import Key


@dataclass(slots=True)
class HeldStep:
    """What waits for a step to open.

    Attributes
    ----------
    tasks : dict
        Product tasks, with the ranks that run them.
    loads : dict
        Blocks of A and B that this step reads, and whose loads wait for such a step, in the order of the tasks.
    replicas : dict
        Blocks with the ranks that need a replica, in the order of the tasks that read them.
    """

    tasks: dict[Key, int] = field(default_factory=dict)
    loads: dict[Key, None] = field(default_factory=dict)
    replicas: dict[tuple[Key, int], None] = field(default_factory=dict)


class Lookahead:
    """Steps of one product by their order: what is unfinished in each, and what waits for those that are not open.

    Parameters
    ----------
    steps : int
        Steps that may be open at a time.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        # Sorted by order: a chain may have thousands of steps.
        self.unfinished: SortedDict = SortedDict()  # order -> set of product tasks
        self.held: SortedDict = SortedDict()  # order -> HeldStep

    def add(self, order: int, key: Key) -> HeldStep:
        """Add a product task to a step; return what waits for this step to open."""
        self.unfinished.setdefault(order, set()).add(key)
        return self.held.setdefault(order, HeldStep())

    def finish(self, order: int, key: Key) -> bool:
        """Note that a product task is done, or will never run; return whether it was the last one of its step."""
        tasks = self.unfinished.get(order)
        if tasks is None or key not in tasks:
            return False
        tasks.discard(key)
        if tasks:
            return False
        del self.unfinished[order]
        return True

    @property
    def first(self) -> float:
        """Order of the first step that is not finished. Infinity if there is none."""
        return next(iter(self.unfinished), math.inf)

    def open(self, before: float = math.inf) -> list[HeldStep]:
        """Open the steps that need not wait any longer; return what waited for them, in the order of steps.

        `before` is the first unfinished order of the wave before this one, if that is a product of its own.
        """
        end = min(self.first, before) + self.steps
        return [self.held.pop(order) for order in list(self.held.irange(maximum=end, inclusive=(True, False)))]

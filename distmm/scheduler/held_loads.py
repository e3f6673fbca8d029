"""Loads of blocks of A and B that wait for a step of a product, although other tasks read the blocks, too. Pure.

A load waits for the first step that reads its block. Tasks that arrive later may read the block in an earlier step, or
in another product. They must not wait for a step that opens only after they have run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from distmm.graph.placement import Key, Placement
from distmm.scheduler.product_state import ProductState

Step = tuple[str, int]  # a product, and the order of a step
Load = tuple[tuple[Key, ...], int]  # the tasks that make a block, and their rank


class HeldLoads:
    """The loads that wait for steps of products.

    Attributes
    ----------
    steps : dict
        By block the step for which its load waits.
    readers : dict
        By block whose load waits: the other products that read it, with the first of their tasks that does.
    waits : dict
        By product and by order of its steps: blocks that the step reads, and whose loads waited for another product.
    """

    def __init__(self, products: Mapping[str, ProductState]) -> None:
        self.products = products
        self.steps: dict[Key, Step] = {}
        self.readers: defaultdict[Key, dict[str, Placement]] = defaultdict(dict)
        self.waits: defaultdict[str, defaultdict[int, set[Key]]] = defaultdict(lambda: defaultdict(set))

    def __iter__(self) -> Iterator[object]:
        """All that is remembered: nothing where no product is under way."""
        return chain(self.steps, self.readers, self.waits)

    def hold(self, block: Key, load: Load, product: str, order: int) -> None:
        """Have a load wait for a step."""
        self.products[product].lookahead.held[order].loads[block] = load
        self.steps[block] = product, order

    def opened(self, blocks: Iterable[Key]) -> None:
        """Note that the loads of these blocks do not wait any longer."""
        for block in blocks:
            self.steps.pop(block, None)
            self.readers.pop(block, None)

    def advance(self, block: Key, where: Placement) -> dict[Key, int]:
        """See to it that the load of a block does not wait for a step that opens only after a new task has run.

        If the load waits for a later step of the task's own product, it then waits for the task's step. If it waits for
        a step of another product which opens only after the task's step, it starts. Otherwise nothing changes.

        Parameters
        ----------
        block : tuple
        where : Placement
            That of the task.

        Returns
        -------
        dict
            Tasks to start, with their ranks.
        """
        if (step := self.steps.get(block)) is None:
            return {}
        holder, order = step
        held = self.products[holder].lookahead.held
        if holder == where.product:
            if order > where.order:
                self.hold(block, held[order].loads.pop(block), holder, where.order)
        elif self._ended_before(step).get(where.product, -1) >= where.order:
            makers, rank = held[order].loads.pop(block)
            self.opened([block])
            return dict.fromkeys(makers, rank)
        else:
            self._wait(block, where)
        return {}

    def forget(self, product: str, loads: Mapping[Key, Load]) -> dict[Key, int]:
        """Forget a product. The loads that it held wait for the first step of any other product that reads the block.

        They start if there is none, or if that step opens only after a step of another product that reads the block.

        Returns
        -------
        dict
            Tasks to start, with their ranks.
        """
        self.waits.pop(product, None)
        others = {block: self.readers.get(block, {}).values() for block in loads}
        self.opened(loads)
        start: dict[Key, int] = {}
        for block, load in loads.items():
            in_order = sorted((at for at in others[block] if at.product in self.products), key=lambda at: at.order)
            if not in_order or not self._pass_on(block, load, *in_order):
                start.update(dict.fromkeys(*load))
        return start

    def _pass_on(self, block: Key, load: Load, first: Placement, *others: Placement) -> bool:
        """Have a load wait for the step of its first reader; return False if it must not."""
        step, held = (first.product, first.order), self.products[first.product].lookahead.held
        ended = self._ended_before(step) if first.order in held else None
        if ended is None or any(ended.get(where.product, -1) >= where.order for where in others):
            return False
        self.hold(block, load, *step)
        for where in others:
            self._wait(block, where)
        return True

    def _wait(self, block: Key, where: Placement) -> None:
        """Note that a task waits for a load which waits for a step of another product."""
        if self.steps[block][0] != where.product:
            self.waits[where.product][where.order].add(block)
            first = self.readers[block].setdefault(where.product, where)
            if where.order < first.order:
                self.readers[block][where.product] = where

    def _ended_before(self, step: Step) -> dict[str, int]:
        """Return the last step of each product that ends before a step opens, directly or by way of others."""
        ended: dict[str, int] = {}
        stack = [step]
        while stack:
            name, order = stack.pop()
            last = order - self.products[name].lookahead.steps  # all steps up to this one end before
            before = ended.get(name)
            if before is not None and before >= last:
                continue
            ended[name] = last
            for own, blocks in self.waits.get(name, {}).items():
                if own <= last and (before is None or own > before):
                    needed = {self.steps[block] for block in blocks if block in self.steps}
                    stack += [each for each in needed if each[0] != name]
        return ended

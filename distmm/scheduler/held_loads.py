"""Loads of blocks of A and B that wait for a step of a product, although other tasks read the blocks, too. Pure.

A load waits for the first step that reads its block. Tasks that arrive later may read the block in an earlier step, or
in another product. They must not wait for a step that opens only after they have run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from distmm.graph.placement import Key, Placement
from distmm.scheduler.product_state import ProductState

__all__ = ["HeldLoads"]

Step = tuple[str, int]  # a product, and the order of a step


class HeldLoads:
    """The loads that wait for steps of products, when new tasks arrive or a product is forgotten.

    Attributes
    ----------
    steps : dict
        By block the step for which its load waits.
    waits : dict
        By product and by order of its steps: the steps of other products that must open before this one can end.
    """

    def __init__(self, products: Mapping[str, ProductState]) -> None:
        self.products = products
        self.steps: dict[Key, Step] = {
            block: (name, order)
            for name, product in products.items()
            for order, held in product.lookahead.held.items()
            for block in held.loads
        }
        self.waits: defaultdict[str, defaultdict[int, set[Step]]] = defaultdict(lambda: defaultdict(set))
        if self.steps:
            for product in products.values():
                for key, task in product.tasks.items():
                    if key not in product.done:
                        for block in task.operands:
                            if (step := self.steps.get(block)) is not None:
                                self._wait(task.where, step)

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
                held[where.order].loads[block] = held[order].loads.pop(block)
                self.steps[block] = holder, where.order
        elif self._opens_after(step, where):
            makers, rank = held[order].loads.pop(block)
            del self.steps[block]
            return dict.fromkeys(makers, rank)
        else:
            self._wait(where, step)
        return {}

    def pass_on(self, loads: Mapping[Key, tuple[tuple[Key, ...], int]]) -> dict[Key, int]:
        """Have loads that a forgotten product held wait for the first step of any other product that reads the block.

        They start if there is none, or if that step opens only after a step of another product that reads the block.

        Returns
        -------
        dict
            Tasks to start, with their ranks.
        """
        readers: defaultdict[Key, dict[str, Placement]] = defaultdict(dict)  # the first one of each product
        for name, product in self.products.items():
            for key, task in product.tasks.items():
                if key not in product.done:
                    for block in loads.keys() & set(task.operands):
                        first = readers[block].get(name, task.where)
                        readers[block][name] = min(first, task.where, key=lambda where: where.order)
        start: dict[Key, int] = {}
        for block, load in loads.items():
            in_order = sorted(readers[block].values(), key=lambda where: where.order)
            if not in_order or not self._hold(block, load, *in_order):
                start.update(dict.fromkeys(*load))
        return start

    def _hold(self, block: Key, load: tuple[tuple[Key, ...], int], first: Placement, *others: Placement) -> bool:
        """Have a load wait for the step of its first reader; return False if it must not."""
        step, held = (first.product, first.order), self.products[first.product].lookahead.held
        if first.order not in held or any(self._opens_after(step, where) for where in others):
            return False
        held[first.order].loads[block] = load
        for where in others:
            self._wait(where, step)
        return True

    def _wait(self, where: Placement, step: Step) -> None:
        if step[0] != where.product:
            self.waits[where.product][where.order].add(step)

    def _opens_after(self, step: Step, where: Placement) -> bool:
        """Whether a step opens only after the step of a task has ended, directly or by way of other products."""
        stack, seen = [step], {step}
        while stack:
            name, order = stack.pop()
            last = order - self.products[name].lookahead.steps  # all steps up to this one end before
            if name == where.product and last >= where.order:
                return True
            needed = {each for own, steps in self.waits[name].items() if own <= last for each in steps} - seen
            seen |= needed
            stack += needed
        return False

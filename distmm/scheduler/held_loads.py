"""Loads of blocks of A and B that wait for a step of a product, although other tasks read the blocks, too. Pure.

A load waits for the first step that reads its block. Tasks that arrive later may read the block in an earlier step: the
load then waits for that step. If they belong to another product, the load starts, as the loads do of blocks that
several products of one graph read: no product waits for a step of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from distmm.graph.placement import Key, Placement
from distmm.scheduler.product_state import ProductState

Load = tuple[tuple[Key, ...], int]  # the tasks that make a block, and their rank


class HeldLoads:
    """The loads that wait for steps of products. `steps` has the product and the order of the step, by block."""

    def __init__(self, products: Mapping[str, ProductState]) -> None:
        self.products = products
        self.steps: dict[Key, tuple[str, int]] = {}

    def __iter__(self) -> Iterator[Key]:
        """All that is remembered: nothing where no product is under way."""
        return iter(self.steps)

    def hold(self, block: Key, load: Load, product: str, order: int) -> None:
        """Have a load wait for a step."""
        self.products[product].lookahead.held[order].loads[block] = load
        self.steps[block] = product, order

    def opened(self, blocks: Iterable[Key]) -> None:
        """Note that the loads of these blocks do not wait any longer."""
        for block in blocks:
            self.steps.pop(block, None)

    def advance(self, block: Key, where: Placement) -> dict[Key, int]:
        """See to it that the load of a block does not wait for a step that opens only after a new task has run.

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
        if holder != where.product:
            makers, rank = held[order].loads.pop(block)
            self.opened([block])
            return dict.fromkeys(makers, rank)
        if order > where.order:
            self.hold(block, held[order].loads.pop(block), holder, where.order)
        return {}

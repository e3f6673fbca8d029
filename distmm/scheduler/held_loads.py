"""Loads of blocks of A and B that wait for a step of a product to open, while other tasks want the blocks, too. Pure.

A load waits for the first step that reads its block. Tasks that arrive later may read the block in an earlier step, or
in another product. They must not wait for a step that cannot open before they have run.
"""

from __future__ import annotations

from collections.abc import Mapping

from distmm.graph.placement import Key, Placement
from distmm.scheduler.product_state import PlannedTask, ProductState

__all__ = ["advance", "find", "pass_on"]


def find(products: Mapping[str, ProductState]) -> dict[Key, tuple[str, int]]:
    """Return the blocks whose loads wait for a step: the step's product, and its order."""
    return {
        block: (name, order)
        for name, product in products.items()
        for order, held in product.lookahead.held.items()
        for block in held.loads
    }


def advance(
    products: Mapping[str, ProductState], block: Key, where: Placement, holder: str, order: int
) -> dict[Key, int]:
    """Let the load of a block come in time for a new task.

    It waits for the task's own step if that is an earlier one of the same product. It goes on waiting for a step of
    another product, unless that product may wait for the task's: then the load starts.

    Parameters
    ----------
    products : mapping
        All products by name, the one of the new task among them.
    where : Placement
        That of the task.
    holder, order : str, int
        The step for which the load waits, as `find` returns it.

    Returns
    -------
    dict
        Tasks to start, with their ranks.
    """
    held = products[holder].lookahead.held
    if holder == where.product:
        if order > where.order:
            held[where.order].loads[block] = held[order].loads.pop(block)
        return {}
    if not _waits_for(products, holder, where.product):
        return {}
    makers, rank = held[order].loads.pop(block)
    return dict.fromkeys(makers, rank)


def pass_on(products: Mapping[str, ProductState], loads: Mapping[Key, tuple[tuple[Key, ...], int]]) -> dict[Key, int]:
    """Have loads that a forgotten product held wait for the only other product that reads the same block.

    Without one they start, and also if several products read a block: none of them waits for another one's step.

    Returns
    -------
    dict
        Tasks to start, with their ranks.
    """
    if not loads:
        return {}
    first: dict[Key, PlannedTask] = {}
    several: set[Key] = set()
    for product in products.values():
        for task in product.tasks.values():
            if task.key not in product.done:
                for block in loads.keys() & set(task.operands):
                    before = first.setdefault(block, task)
                    first[block] = min(before, task, key=lambda one: one.where.order)
                    if before.where.product != task.where.product:
                        several.add(block)
    start: dict[Key, int] = {}
    for block, (makers, rank) in loads.items():
        reader = None if block in several else first.get(block)
        held = products[reader.where.product].lookahead.held if reader is not None else {}
        if reader is not None and reader.where.order in held:
            held[reader.where.order].loads[block] = makers, rank
        else:
            start.update(dict.fromkeys(makers, rank))
    return start


def _waits_for(products: Mapping[str, ProductState], name: str, other: str) -> bool:
    """Whether a product may wait for a step of `other` to open, directly or because another product does."""
    stack, seen = [name], {name}
    while stack:
        product = products[stack.pop()]
        reads = {block for key, task in product.tasks.items() if key not in product.done for block in task.operands}
        for each, holder in products.items():
            if each in seen or all(reads.isdisjoint(held.loads) for held in holder.lookahead.held.values()):
                continue
            if each == other:
                return True
            seen.add(each)
            stack.append(each)
    return False

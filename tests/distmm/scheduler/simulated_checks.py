"""What must hold in the model of `simulated.py` whatever happens: each decision of the state machine is checked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from distmm.graph.placement import Chain, Key, Placement
from distmm.scheduler.product_state import Limits
from tests.distmm.scheduler.drawn_products import is_operand

if TYPE_CHECKING:
    from tests.distmm.scheduler.simulated import Model
    from tests.distmm.scheduler.simulated_tasks import Task

__all__ = ["Checks"]


class Checks:
    """Limits of the products of one model, and what the state machine was told of their tasks."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.workers: dict[str, int] = {}  # product -> workers when it arrived
        self.limits: dict[str, Limits] = {}
        # Whether a client has asked again for what runs, or given up a part of it. What is under way goes on then:
        # chains of earlier waves take slots beside those of later ones, and loads start for steps of other products.
        self.changed = False
        self.refused: set[Key] = set()  # what a client asks for, and what reads more blocks of C at a time than fit

    def arrive(self, limits: Mapping[str, Limits], places: Iterable[Placement]) -> None:
        """Note the products of a graph, before the state machine takes it."""
        for name in limits.keys() - self.model.machine.products.keys():
            self.workers[name], self.limits[name] = len(self.model.machine.ranks), limits[name]

    def told(self, event: str, task: Task) -> None:
        """Note what the state machine hears of a task."""
        reduced = event == "finished" and task.product and task.spec.plan.result == "reduced"
        task.done |= event in ("finished", "forgotten")
        task.closed |= event != "released"
        task.left |= event != "finished" or reduced

    def join(self, replaced: str | None) -> None:
        """A worker joins: it inherits the rank of a dead worker if there is one."""
        ranks = self.model.machine.ranks
        assert replaced is not None or len(ranks) == len(ranks.alive), "a dead worker's rank was not inherited"

    # Decisions

    def drop(self, block: Task, rank: int) -> None:
        """A replica is dropped: nobody reads it there any more, and another copy of the block stays."""
        readers = [one for one in block.readers if one.product and not one.done and self._reads_at(one, rank)]
        assert not readers, f"{block.key} is dropped at {rank} before {readers[0].key} has read it"
        assert len(self.model.holders(block.key)) > 1, f"the last copy of {block.key} is dropped"

    def start(self, task: Task, rank: int) -> None:
        """A held task starts: a product task at its owner, in an open step; a load for such a task."""
        if task.product:
            assert self._reads_at(task, rank), f"{task.key} starts at {rank}, and does not belong there"
        readers = [task] if task.product else [reader for reader in task.readers if reader.product]
        assert self.changed or not readers or any(self._is_open(reader) for reader in readers), (
            f"{task.key} starts too early"
        )

    def copy(self, block: Task, rank: int) -> None:
        """A replica is made: for a product task that is to read it there."""
        readers = [one for one in block.readers if one.product and self._reads_at(one, rank)]
        assert readers, f"{block.key} is copied to {rank}, where nobody reads it"

    def slots(self) -> None:
        """No rank holds more blocks of C, made or begun, than it has slots; and it has no more of them than fit."""
        begun: defaultdict[tuple[str, int], set[tuple[str, Chain]]] = defaultdict(set)
        open_chains: set[tuple[str, Chain]] = set()  # those whose blocks, or mirrored blocks, are not gone yet
        for task in self.model.tasks.values():
            if (where := task.where) is None or self.limits[where.product].output_slots is None or self.changed:
                continue
            if task.makes_block and not task.left:
                open_chains.add((where.product, where.chain))
            if task.product and not task.held and task.spec.is_first:
                begun[where.run, where.rank].add((where.product, where.chain))
        for (run, rank), chains in begun.items():
            held = sorted(chains & open_chains)
            slots = self.model.machine.runs.get(run)
            most = math.inf if slots is None else slots.most
            assert len(held) <= most, f"{len(held)} blocks of C at rank {rank}, which has {most} slots: {held}"
            limits = self.limits[held[0][0]] if held else Limits()
            fit = limits.slots_that_fit if limits.wave_orders else math.inf
            assert slots is None or most <= max(limits.output_slots or 0, fit), f"{most} slots, and {fit} fit"

    def replicas(self) -> None:
        """No rank but its home keeps a replica of a block that no product task is to read there."""
        machine = self.model.machine
        for task in self.model.tasks.values():
            if task.state == "memory" and is_operand(task.key) and task.key[0][0] != "E":
                ranks = {self.model.rank(one.where) for one in task.readers if one.where is not None and not one.done}
                idle = self.model.holders(task.key) - ranks - {machine.replicas.home.get(task.key)}
                used = any(waiter.on is not None for waiter in task.waiters)
                assert not idle or used, f"{task.key} stays at {idle}, where nobody will read it"

    def idle(self) -> None:
        """Nothing can go on: no task waits, and none is held."""
        waiting = [task.key for task in self.model.waiting]
        held = [task.key for task in self.model.waiting if task.held]
        assert not waiting, f"nothing can go on, {len(waiting)} tasks wait, and {len(held)} are held: {waiting[:4]}"

    def _reads_at(self, task: Task, rank: int) -> bool:
        assert task.where is not None
        return self.model.rank(task.where) == rank

    def _is_open(self, task: Task) -> bool:
        where = task.where
        assert where is not None
        unfinished = (
            other.where.order
            for other in self.model.tasks.values()
            if other.product and other.where is not None and other.where.product == where.product and not other.closed
        )
        return where.order < min(unfinished, default=where.order) + self.limits[where.product].lookahead

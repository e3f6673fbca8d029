"""The state machine of all products on one scheduler: events in, decisions out.

It knows keys, ranks and numbers, and no type of Dask. So tests can drive it through any order of events
(``tests/distmm/scheduler/test_simulated_schedules.py``). The plugin (`distmm.scheduler.plugin`) tells it what happens
on the scheduler, and carries out what it decides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from weakref import WeakValueDictionary

from distmm.graph.placement import Key, Placement
from distmm.scheduler.output_slots import Neighbours, OutputSlots, most_at_a_time
from distmm.scheduler.product_state import Arrangement, Decisions, Limits, OperandBlock, PlannedTask, ProductState
from distmm.scheduler.ranks import Ranks
from distmm.scheduler.replicas import Replicas


class Products:
    """Products by name, the ranks of workers, and the replicas of blocks that products share.

    Events are methods; `undecided` says whether they call for `decide`. Workers join and leave `ranks`, and blocks that
    are forgotten leave `replicas`.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = Ranks() if ranks is None else ranks
        self.products: dict[str, ProductState] = {}
        # Blocks whose loads wait for the first step of any product that reads them: the tasks that make each, and their
        # rank; and the products that have such steps.
        self.loads: dict[Key, tuple[tuple[Key, ...], int]] = {}
        self.load_readers: defaultdict[Key, set[str]] = defaultdict(set)
        self.replicas = Replicas()
        self.runs: WeakValueDictionary[str, OutputSlots] = WeakValueDictionary()
        self.latest: WeakValueDictionary[str, ProductState] = WeakValueDictionary()  # by run: the last wave that came
        self.opening: dict[str, None] = {}  # products that may open steps
        self.loaded: list[Key] = []  # blocks that have come into memory, and are to be copied
        self.orphans: dict[Key, int] = {}  # tasks held for a product that is gone, and that others may need now

    # Events

    def share(self, rank: int) -> None:
        """Give a worker that has just joined an even share of the chains of all products: of their steps to come.

        Products that may not run on all workers are left alone.
        """
        for product in self.products.values():
            for held, task in product.even_share() if isinstance(product.ranks, range) else ():
                self.replicas.used(task.operands, held.tasks[task.key])
                product.shared[task.key] = held.tasks[task.key] = rank
                for block in task.operands:
                    if self.replicas.use(block, rank):
                        held.replicas[block, rank] = None

    def renumber(self) -> None:
        """Give up the ranks of dead workers before a graph arrives, where no product is under way."""
        if not self.products:
            self.ranks.forget_dead()

    def arrived(
        self,
        tasks: Iterable[PlannedTask],
        others: Iterable[tuple[Key, Placement]],
        operands: Mapping[Key, OperandBlock],
        kept: Collection[str] = (),
        limits: Mapping[str, Limits] = MappingProxyType({}),
        ranks: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> Arrangement:
        """Take the tasks of a new graph that are to run.

        Parameters
        ----------
        tasks, others
            Product tasks; and tasks that read what product tasks read or make, and wait for nothing else.
        operands, kept
            The blocks that `tasks` read, and the names of arrays whose blocks clients keep.
        limits, ranks : mapping
            Limits of the products that are new, and the ranks of those of them that may not run on all.
        """
        arranged = Arrangement()
        replicas = self.replicas
        seen: set[Key] = set()
        # By order: a block that several steps read waits for the first of them.
        for task in sorted(tasks, key=attrgetter("where.order")):
            where, order = task.where, task.where.order
            product = self.products.get(where.product)
            if product is None:
                allowed = ranks.get(where.product, range(len(self.ranks)))
                product = self._begin(where, limits.get(where.product, Limits()), allowed)
            # A task that was given up before it ran, and is wanted again, has its uses planned already.
            planned = task.key in product.tasks and task.key not in product.done
            held, rank = product.add(task), product.rank(task.where.rank, task.key)
            held.tasks[task.key] = rank
            arranged.hold.append((task.key, order))
            if product.slots is not None:
                product.slots.expect(task.key, where, task.fused, task.is_first)
            for block, planned_home in zip(task.operands, where.homes, strict=True):
                if planned or replicas.use(block, rank):
                    held.replicas[block, rank] = None
                if block not in seen:
                    seen.add(block)
                    operand, home = operands[block], product.rank(planned_home)
                    replicas.settle(block, home, operand.holders)
                    earlier = order - product.limits.loads_first
                    if operand.reader != where.product:
                        arranged.place += [(maker, home, earlier) for maker in operand.makers]
                    elif operand.makers:
                        for maker in operand.makers:
                            self.orphans.pop(maker, None)
                        arranged.hold += [(maker, earlier) for maker in operand.makers]
                        self.loads[block] = operand.makers, home
                if block in self.loads:
                    held.loads[block] = None
                    self.load_readers[block].add(where.product)
            self.opening[where.product] = None
        for key, where in others:
            product = self.products.get(where.product)
            rank = product.rank(where.rank) if product else where.rank % len(self.ranks)
            arranged.place.append((key, rank, where.order))
            if product is not None and product.slots is not None:
                product.slots.expect(key, where)
        for name in kept:
            product = self.products.get(name)
            if product is not None and product.slots is not None and not product.limits.wave_orders:
                # A client keeps blocks of C: they do not leave, and return no slot.
                product.slots.require(math.inf)
        return arranged

    def make_room(
        self, names: Iterable[str], readers: Neighbours, reads: Neighbours, stays: Callable[[Key], bool]
    ) -> list[tuple[str, int, list[Key]]]:
        """Give the workers of streamed products the slots that the readers of C need.

        Parameters
        ----------
        names : iterable of str
            Arrays whose blocks have new readers. Those that are no streamed products are left out.
        readers, reads : callable
            As for `most_at_a_time`.
        stays : callable
            Whether a block stays in memory: a client keeps it, or another product reads it.

        Returns
        -------
        list of (str, int, list of keys)
            Products for which so many slots do not fit, and their blocks that are not gone yet.
        """
        refused = []
        for name in names:
            product = self.products.get(name)
            if product is None or product.slots is None or not (made := product.made_blocks(stays)):
                continue
            needed = most_at_a_time(made, readers, reads)
            if needed > max(product.limits.slots_that_fit, product.slots.most):
                refused.append((name, needed, [key for each in made for key in each.keys]))
            else:
                product.slots.require(needed)
        return refused

    def finished(self, key: Key, where: Placement) -> None:
        """Count a product task that is done."""
        if (known := self._known(key, where)) is not None:
            self._count(*known)
            if known[0].limits.reduced or known[1].reads:
                self.released(key, where)
        self.block_loaded(key)  # C may be an operand of another product

    def given_up(self, key: Key, where: Placement) -> None:
        """Stop waiting for a task that has failed, or that is not wanted any more."""
        self.released(key, where)
        if (known := self._known(key, where)) is not None:
            self._close(*known)

    def released(self, key: Key, where: Placement) -> None:
        """Return the slot of a block of C that was released. A lost block keeps its slot, and is computed again."""
        product = self.products.get(where.product)
        if product is not None and product.slots is not None:
            product.slots.leave(key, where)

    def forgotten(self, key: Key, where: Placement) -> None:
        """Forget a task that the scheduler has forgotten; if it was the last one, forget the product."""
        self.released(key, where)
        self.replicas.forget(key)
        if (known := self._known(key, where)) is None:
            return
        self._count(*known)
        product, _ = known
        del product.tasks[key]
        product.shared.pop(key, None)
        if not product.tasks:
            del self.products[where.product]
            for block in [block for held in product.lookahead.held.values() for block in held.loads]:
                self.load_readers[block].discard(where.product)
                if not self.load_readers[block]:
                    self.orphans.update(self._load(block))

    def give_up(self, name: str) -> None:
        """Forget a product and its tasks at once."""
        if (product := self.products.get(name)) is not None:
            for key, task in list(product.tasks.items()):
                self.forgotten(key, task.where)

    def block_loaded(self, block: Key) -> None:
        """Copy a block that has come into memory to the ranks whose open steps need it."""
        if block in self.replicas.missing:
            self.loaded.append(block)

    # Decisions

    @property
    def undecided(self) -> bool:
        """Whether there is something to decide."""
        known = self.opening or self.loaded or self.replicas.used_up or self.orphans
        return bool(known) or any(slots.changed for slots in self.runs.values())

    def decide(self, holders: Callable[[Key], Collection[int]]) -> Decisions:
        """Decide what to do after the events since the last call.

        Parameters
        ----------
        holders : callable
            Ranks that hold a block; none for a block that is not in memory.
        """
        decided = Decisions()
        if self.replicas.used_up:
            decided.drop = self.replicas.drops(holders)
        if self.orphans:
            decided.start += self.orphans.items()
            self.orphans.clear()
        blocks = dict.fromkeys(self.loaded)
        self.loaded.clear()
        if self.opening:
            self._open(decided, blocks)
            decided.busy = any(product.lookahead.unfinished for product in self.products.values())
        for slots in self.runs.values():
            for key, where in slots.admit(self._known):
                decided.start.append((key, self.products[where.product].rank(where.rank, key)))
        if blocks:
            decided.copy = self.replicas.copies(blocks, holders)
        return decided

    def _open(self, decided: Decisions, blocks: dict[Key, None]) -> None:
        """Open steps; add the blocks that they read to `blocks`."""
        opening, self.opening = self.opening, {}
        for name in opening:
            if (product := self.products.get(name)) is None:
                continue
            for held in product.open():
                for block in held.loads:
                    decided.start += self._load(block)
                self.replicas.want(held.replicas)
                blocks.update((block, None) for block, _ in held.replicas)
                for key, rank in held.tasks.items():
                    task = product.tasks.get(key)
                    if product.slots is not None and task is not None and task.is_first:
                        product.slots.ask(key, task.where, task.held_priority)
                    else:
                        decided.start.append((key, rank))

    def _load(self, block: Key) -> list[tuple[Key, int]]:
        """Return the tasks that load a block, with their rank; none if they do not wait any longer."""
        self.load_readers.pop(block, None)
        makers, rank = self.loads.pop(block, ((), 0))
        return [(maker, rank) for maker in makers]

    def _begin(self, where: Placement, limits: Limits, ranks: Sequence[int]) -> ProductState:
        slots = None
        if limits.output_slots is not None:
            slots = self.runs.setdefault(where.run, OutputSlots(limits.output_slots))
        product = self.products[where.product] = ProductState(limits, ranks, slots, where.order)
        latest = self.latest.get(where.run)
        # A wave waits only for waves that came before it. A block that is computed again waits for none.
        if latest is None or where.order > latest.begins:
            self.latest[where.run] = product
            if latest is not None:
                product.before, latest.after = latest, where.product
        return product

    def _known(self, key: Key, where: Placement) -> tuple[ProductState, PlannedTask] | None:
        """Return a product task with its product. None for other tasks, and for those that are forgotten."""
        product = self.products.get(where.product)
        task = None if product is None else product.tasks.get(key)
        return None if product is None or task is None else (product, task)

    def _count(self, product: ProductState, task: PlannedTask) -> None:
        """Count a task as done, once: it does not need its operands any more. Its step may end with it."""
        if task.key not in product.done:
            product.done.add(task.key)
            self.replicas.used(task.operands, product.rank(task.where.rank, task.key))
        self._close(product, task)

    def _close(self, product: ProductState, task: PlannedTask) -> None:
        """Open another step of the product if this task was the last one of its step."""
        if product.lookahead.finish(task.where.order, task.key):
            self.opening |= dict.fromkeys((task.where.product, product.after))

"""What the scheduler knows of one product: its limits, its tasks, which are done, and what is decided. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distmm.graph.placement import Chain, Key, Placement
from distmm.planning.plan import Plan
from distmm.planning.schedule import LOOKAHEAD
from distmm.scheduler.lookahead import HeldStep, Lookahead
from distmm.scheduler.output_slots import MadeBlock, OutputSlots
from distmm.scheduler.replicas import Replica


class Limits(NamedTuple):
    """What a plan bounds at run time. The only place of this package that reads a plan.

    Attributes
    ----------
    lookahead : int
        Steps that may be open at a time.
    output_slots : float or None
        Blocks of C that each worker may hold; None where all of C stays.
    slots_that_fit : float
        The most that it may hold if the tasks that read C need more of them at a time.
    wave_orders : int
        Orders (`Placement.order`) of one wave, if blocks of C leave when the user's tasks have read them; else 0.
    loads_first : int
        Steps by which loads come before product tasks in the order of priorities. Loads on GPUs, and
        tasks that join small chunks, take little time of the workers' threads, and other workers wait for them: those
        that may start come before product tasks of open steps.
    reduced : bool
        Whether the task that finishes a block of C reduces it. The chain then does not need its slot any longer.
    """

    lookahead: int = LOOKAHEAD
    output_slots: float | None = None
    loads_first: int = 0
    slots_that_fit: float = math.inf
    wave_orders: int = 0
    reduced: bool = False

    @classmethod
    def of(cls, plan: Plan | None) -> Limits:
        """Read the limits of a plan; None for tasks that a client has expanded, which know no plan."""
        if plan is None:
            return cls()
        device = plan.cluster.device
        first = plan.lookahead if device == "cuda" or plan.schedule.gathers(plan.problem, device) else 0
        slots = plan.peak.output_slots
        reduced = plan.result == "reduced"
        orders = plan.schedule.wave_orders if plan.streamed and not reduced and slots is not None else 0
        return cls(plan.lookahead, slots, first, plan.slots_that_fit, orders, reduced)


class PlannedTask(NamedTuple):
    """A product task as it arrives.

    Attributes
    ----------
    key : tuple
    where : Placement
    is_first : bool
        Whether it begins a chain, and therefore needs a slot for its block of C.
    operands : tuple of keys
        Blocks of A and B that it reads.
    priority : tuple
        The scheduler's priority before any product was placed: lower starts earlier.
    fused : bool
        Whether it is also a task that reads the block of C that it finishes, and has the key of that one.
    reads : bool
        Whether the block is then gone when the task ends: its result is no view of the block.
    """

    key: Key
    where: Placement
    is_first: bool
    operands: tuple[Key, ...]
    priority: tuple[Any, ...] = (0,)
    fused: bool = False
    reads: bool = False

    @property
    def held_priority(self) -> tuple[Any, ...]:
        """Priority of the task when it is held: see `Arrangement`."""
        first, *rest = self.priority
        return (first + self.where.order, *rest)


class OperandBlock(NamedTuple):
    """A block of A or B, as the scheduler knows it when a product arrives.

    Attributes
    ----------
    makers : tuple of keys
        Tasks that still have to run and that only this block needs; the first one makes it.
    reader : str or None
        The only product that reads it; None if anything else does.
    holders : collection of int
        Ranks that hold it already.
    """

    makers: tuple[Key, ...] = ()
    reader: str | None = None
    holders: Collection[int] = ()


class ProductState:
    """One product: it exists from the arrival of its first task until the scheduler has forgotten all of them.

    Parameters
    ----------
    limits : Limits
    ranks : sequence of int
        Those that it uses: all when it arrived, or those of them that the user's restrictions allow. Workers that join
        later get other ranks, and change nothing for it but on adaptive clusters (`Products.share`).
    slots : OutputSlots, optional
        Shared with other products of the same run.
    begins : int
        Order of its first step.

    Attributes
    ----------
    before : ProductState or None
        The wave of the same run before this one, until it is finished. Both share the steps of the lookahead.
    after : str
        Name of the wave after this one.
    """

    def __init__(self, limits: Limits, ranks: Sequence[int], slots: OutputSlots | None = None, begins: int = 0) -> None:
        self.limits, self.ranks, self.slots, self.begins = limits, ranks, slots, begins
        self.before: ProductState | None = None
        self.after = ""
        self.lookahead = Lookahead(limits.lookahead)
        self.tasks: dict[Key, PlannedTask] = {}  # product tasks that the scheduler knows
        self.done: set[Key] = set()
        self.total = 0  # product tasks, those that the scheduler has forgotten included
        self.shared: dict[Key, int] = {}  # product tasks that workers have taken over which joined later, with the rank

    def rank(self, planned: int, task: Key | None = None) -> int:
        """Rank of the cluster for a rank of the plan. A plan may be for more workers than there are."""
        shared = None if task is None else self.shared.get(task)
        return self.ranks[planned % len(self.ranks)] if shared is None else shared

    def open(self) -> list[HeldStep]:
        """Open the steps that need not wait any longer."""
        if self.before is not None and self.before.lookahead.first == math.inf:
            self.before = None
        return self.lookahead.open(math.inf if self.before is None else self.before.lookahead.first)

    @property
    def parallel(self) -> int:
        """Most product tasks that may run at the same time: the unfinished ones of one step."""
        return max(map(len, self.lookahead.unfinished.values()), default=0)

    def even_share(self) -> list[tuple[HeldStep, PlannedTask]]:
        """Return the tasks in steps to come that one more worker takes over: chains of the ranks that have the most."""
        chains: defaultdict[int, dict[tuple[Chain, int], list[tuple[HeldStep, PlannedTask]]]] = defaultdict(dict)
        for held in self.lookahead.held.values():
            for key, rank in held.tasks.items():
                if (task := self.tasks.get(key)) is not None:
                    chains[rank].setdefault((task.where.chain, task.where.rank), []).append((held, task))
        shared: list[tuple[HeldStep, PlannedTask]] = []
        for _ in range(sum(map(len, chains.values())) // (len(chains) + 1)):
            shared += max(chains.values(), key=len).popitem()[1]
        return shared

    def made_blocks(self, stays: Callable[[Key], bool]) -> list[MadeBlock]:
        """List the blocks of C that are still to be made, or in memory, if they leave when they have been read."""
        made = []
        for keys in self.slots.results.values() if self.slots and self.limits.wave_orders else ():
            task = next((self.tasks[key] for key in keys if key in self.tasks), None)
            if task is not None:
                where, wave = task.where, task.where.order // self.limits.wave_orders
                made.append(MadeBlock(tuple(keys), wave, set(where.owners), any(map(stays, keys)), task.reads))
        return made

    def add(self, task: PlannedTask) -> HeldStep:
        """Add a task that is to run; return what waits for its step to open."""
        key = task.key
        if key in self.done:  # released, and wanted again, perhaps before it was forgotten
            self.done.discard(key)
        elif key not in self.tasks:
            self.total += 1
        self.tasks[key] = task
        return self.lookahead.add(task.where.order, key)


@dataclass(slots=True)
class Arrangement:
    """What happens to the tasks of a graph that has just arrived, before any of them runs.

    `order` is added to the priority of a task: tasks of early steps start first, whatever their chains.
    """

    hold: list[tuple[Key, int]] = field(default_factory=list)  # task, order: it waits for its step
    place: list[tuple[Key, int, int]] = field(default_factory=list)  # task, rank, order: it may run


@dataclass(slots=True)
class Decisions:
    """What to do now. Drops come first: they make room. Tasks and blocks that are gone by then are left out."""

    drop: list[Replica] = field(default_factory=list)
    start: list[tuple[Key, int]] = field(default_factory=list)  # held tasks that may run now, at these ranks
    copy: list[Replica] = field(default_factory=list)
    busy: bool | None = None  # whether a product has unfinished steps, where that may have changed

"""A model of Dask's scheduler and its workers: as little of it as the state machine of products depends on.

Tasks are released, waiting, running, in memory, failed or forgotten, by Dask's rules: a result is released when nobody
waits for it, and forgotten when nobody knows a task that reads it. What was lost with a worker, and is needed, is made
again. A seed decides which task runs next, and which worker dies when. `Model` checks each decision of the state
machine against what it counts itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from distmm.graph.placement import Key, Placement
from distmm.scheduler.product_state import Limits, OperandBlock, PlannedTask
from distmm.scheduler.products import Products


@dataclass(eq=False, repr=False)
class Task:
    """A task as the model knows it."""

    key: Key
    needs: list[Task] = field(default_factory=list)
    where: Placement | None = None  # of product tasks, and of those that write their results
    product: bool = False
    limits: Limits = field(default_factory=Limits)
    state: str = "released"
    held: bool = False
    rank: int | None = None  # where it may run
    runs_on: int = -1
    copies: set[int] = field(default_factory=set)
    waiters: set[Task] = field(default_factory=set)
    readers: set[Task] = field(default_factory=set)  # tasks that the scheduler knows
    done: bool = False  # it has been finished once
    gone: bool = False  # and its result let go


class Model:
    """One scheduler, its workers and the tasks of any number of products."""

    def __init__(self, workers: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.machine = Products()
        self.tasks: dict[Key, Task] = {}
        self.wanted: set[Key] = set()
        self.alive: set[int] = set()
        self.workers: dict[str, int] = {}  # product -> workers when it arrived
        self.slots: dict[str, float] = {}  # run -> slots of each rank
        self.fetched: Counter[tuple[Key, int]] = Counter()
        self.dropped: Counter[tuple[Key, int]] = Counter()
        self.addresses = 0
        self.losses = 0
        for name in range(workers):
            self.join(name)

    # Workers

    def join(self, name: int) -> None:
        """Let a worker join; it gets the rank of a dead one, or the next."""
        self.addresses += 1
        self.machine.worker_joined(f"tcp://{self.addresses}", name)
        self.alive = set(self.machine.ranks.alive.values())

    def kill(self, rank: int) -> None:
        """Let a worker die, with what it runs and holds."""
        self.losses += 1
        self.alive.discard(rank)
        for task in list(self.tasks.values()):
            if task.state == "running" and task.runs_on == rank:
                task.state = "waiting"
            if rank in task.copies:
                task.copies.discard(rank)
                if not task.copies:
                    self._lose(task)
        self.machine.worker_left(self.machine.ranks.addresses[rank])

    def _lose(self, task: Task) -> None:
        task.state = "released"
        if task.waiters or task.key in self.wanted:
            for reader in task.waiters:
                if reader.state == "running":
                    reader.state = "waiting"
            for spoilt in self._await(task):
                self.fail(spoilt)
        elif task.where is not None:
            self.machine.released(task.key, task.where)

    def _renumber(self) -> None:
        before = list(self.machine.ranks.addresses)
        self.machine.renumber()
        if (after := self.machine.ranks.addresses) != before:
            self.alive = set(self.machine.ranks.alive.values())
            for task in self.tasks.values():
                task.copies = {after.index(before[rank]) for rank in task.copies}

    # Tasks

    def submit(self, tasks: Iterable[Task], wanted: Iterable[Key]) -> None:
        """Send a graph to the scheduler, whose results a client wants."""
        new = [task for task in tasks if task.key not in self.tasks]
        wanted = list(wanted)
        self._renumber()
        for task in new:
            self.tasks[task.key] = task
            if task.state == "forgotten":  # by the scheduler, and known to the client
                task.state, task.held, task.rank, task.done, task.gone = "released", False, None, False, False
            for other in task.needs:
                other.readers.add(task)
        self.wanted |= set(wanted)
        spoilt = [spoilt for key in wanted for spoilt in self._await(self.tasks[key])]
        run = [task for task in new if task.state == "waiting"]
        planned = [
            PlannedTask(
                task.key,
                task.where,
                task.where.rank,
                task.where.step == 0,
                tuple(other.key for other in task.needs if other.key[0] in ("A", "B", "D")),
                (0, self.random.random()),
            )
            for task in run
            if task.product and task.where is not None
        ]
        self.random.shuffle(planned)
        others = [(task.key, task.where) for task in run if task.where is not None and not task.product]
        operands = {block: self._operand(self.tasks[block]) for one in planned for block in one.operands}
        limits = {task.where.product: task.limits for task in run if task.product and task.where is not None}
        begun = limits.keys() - self.machine.products.keys()
        arranged = self.machine.arrived(planned, others, operands, {key[0] for key in wanted}, limits)
        for one in planned:
            if one.where.product in begun:
                self.workers[one.where.product] = len(self.machine.ranks)
            self.slots.setdefault(one.where.run, limits[one.where.product].output_slots or float("inf"))
        for key, _ in arranged.hold:
            self.tasks[key].held = True
        for key, rank, _ in arranged.place:
            self.tasks[key].rank, self.tasks[key].held = rank, False
        for task in spoilt:
            self.fail(task)

    def _operand(self, task: Task) -> OperandBlock:
        readers = {reader.where.product if reader.where else None for reader in task.readers}
        free = task.state == "waiting" and task.rank is None and not task.held and task.where is None
        makers = [task.key] if free else []
        if makers and len(task.needs) == 1 and len(task.needs[0].readers) == 1 and task.needs[0].state == "waiting":
            makers.append(task.needs[0].key)
        return OperandBlock(tuple(makers), readers.pop() if len(readers) == 1 else None, sorted(task.copies))

    def _await(self, task: Task) -> list[Task]:
        """Let a released task wait, with everything that it needs; return those that need what has failed."""
        stack, spoilt = [task], []
        while stack:
            task = stack.pop()
            if task.state != "released":
                continue
            task.state = "waiting"
            for other in task.needs:
                other.waiters.add(task)
                stack.append(other)
            if any(other.state == "failed" for other in task.needs):
                spoilt.append(task)
        return spoilt

    def runnable(self) -> list[Task]:
        """Tasks that a worker may start."""
        return [
            task
            for task in self.tasks.values()
            if task.state == "waiting" and not task.held and all(other.state == "memory" for other in task.needs)
        ]

    def start(self, task: Task) -> None:
        """Let a worker start a task: the planned one, or any one while that is dead."""
        planned = task.rank
        task.runs_on = planned if planned in self.alive else self.random.choice(sorted(self.alive))  # type: ignore[assignment]
        for other in task.needs:
            if task.runs_on not in other.copies:
                self.fetched[other.key, task.runs_on] += 1
                other.copies.add(task.runs_on)
        task.state = "running"

    def finish(self, task: Task) -> None:
        """Let a running task end."""
        task.state, task.copies, task.done = "memory", {task.runs_on}, True
        if task.where is not None:
            self.machine.finished(task.key, task.where)
        else:
            self.machine.block_loaded(task.key)
        self._let_go(task)
        if task.key not in self.wanted and not task.waiters:
            self._release(task)

    def fail(self, task: Task) -> None:
        """Let a task fail, and with it all that read its result."""
        stack = [task]
        while stack:
            task = stack.pop()
            if task.state in ("waiting", "running"):
                task.state = "failed"
                if task.where is not None:
                    self.machine.given_up(task.key, task.where)
                stack += task.waiters
                self._let_go(task)

    def _let_go(self, task: Task) -> None:
        for other in task.needs:
            other.waiters.discard(task)
            if other.waiters or other.key in self.wanted:
                continue
            if other.state == "memory":
                self._release(other)
            elif other.state in ("waiting", "running"):  # its reader has failed, and the client still wants that one
                self._stop(other)

    def _stop(self, task: Task) -> None:
        task.state = "released"
        if task.where is not None:
            self.machine.given_up(task.key, task.where)
        self._let_go(task)

    def _release(self, task: Task) -> None:
        task.state, task.copies, task.gone = "released", set(), True
        if task.where is not None:
            self.machine.released(task.key, task.where)
        self._forget(task)

    def unwant(self, keys: Iterable[Key]) -> None:
        """Let a client give up results, made or not."""
        for key in keys:
            self.wanted.discard(key)
            self._give_up(self.tasks[key])

    def _give_up(self, task: Task) -> None:
        if task.key in self.wanted or task.waiters or task.state == "forgotten":
            return
        if task.state == "memory":
            self._release(task)
            return
        if task.state in ("waiting", "running"):
            task.state = "released"
            if task.where is not None:
                self.machine.given_up(task.key, task.where)
            for other in task.needs:
                other.waiters.discard(task)
        needs = list(task.needs)
        self._forget(task)
        for other in needs:
            self._give_up(other)

    def _forget(self, task: Task) -> None:
        if task.key in self.wanted or task.readers or task.state == "forgotten":
            return
        task.state = "forgotten"
        del self.tasks[task.key]
        if task.where is not None:
            self.machine.forgotten(task.key, task.where)
        else:
            self.machine.block_forgotten(task.key)
        for other in task.needs:
            other.readers.discard(task)
            other.waiters.discard(task)
            if other.state in ("released", "failed"):
                self._forget(other)
            else:
                self._give_up(other)

    # Decisions

    def decide(self) -> None:
        """Carry out what the state machine decides, and check it."""
        decided = self.machine.decide(self._holders)
        for block, rank in decided.drop:
            task = self.tasks[block]
            readers = [one for one in task.readers if one.product and not one.done and self._rank(one) == rank]
            assert not readers, f"{block} is dropped at {rank} before {readers[0].key} has read it"
            assert len(task.copies) > 1, f"the last copy of {block} is dropped"
            if not any(one.runs_on == rank for one in task.waiters if one.state == "running"):
                task.copies.discard(rank)
                self.dropped[block, rank] += 1
        for key, rank in decided.start:
            if (task := self.tasks.get(key)) is not None:
                if task.product:
                    assert rank == self._rank(task), f"{key} is placed at {rank}, and its owner is {self._rank(task)}"
                self._check_lookahead(task)
                task.held, task.rank = False, rank
        for block, rank in decided.copy:
            task = self.tasks[block]
            readers = [one for one in task.readers if one.product and self._rank(one) == rank]
            assert readers, f"{block} is copied to {rank}, where nobody reads it"
            if rank in self.alive and rank not in task.copies:
                self.fetched[block, rank] += 1
                task.copies.add(rank)
        self.check_slots()

    def _holders(self, key: Key) -> set[int]:
        task = self.tasks.get(key)
        return set(task.copies) if task is not None and task.state == "memory" else set()

    def _rank(self, task: Task) -> int:
        assert task.where is not None
        return task.where.rank % self.workers[task.where.product]

    def _check_lookahead(self, task: Task) -> None:
        """Check that a task that starts belongs to an open step, or is read by a task of one."""
        readers = [task] if task.product else [reader for reader in task.readers if reader.product]
        assert not readers or any(self._is_open(reader) for reader in readers), f"{task.key} starts too early"

    def _is_open(self, task: Task) -> bool:
        where = task.where
        assert where is not None
        unfinished = [
            other.where.order
            for other in self.tasks.values()
            if other.product
            and other.where is not None
            and other.where.product == where.product
            and not other.done
            and other.state not in ("failed", "released")
        ]
        return where.order < min(unfinished, default=where.order) + task.limits.lookahead

    def check_slots(self) -> None:
        """Check that no rank holds more blocks of C, made or begun, than it has slots."""
        begun: dict[tuple[str, int], set[object]] = {}
        for task in self.tasks.values():
            if not task.product or task.held or task.where is None or task.where.step:
                continue
            result = self.tasks.get((task.where.product, task.where.i, task.where.j))
            if result is not None and result.state not in ("failed", "released") and not result.gone:
                begun.setdefault((task.where.run, task.where.rank), set()).add((task.where.product, task.where.chain))
        for (run, rank), chains in begun.items():
            assert len(chains) <= self.slots[run], f"{len(chains)} blocks of C at rank {rank}: {chains}"

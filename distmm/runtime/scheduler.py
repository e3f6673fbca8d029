"""Scheduler plugin: places product tasks and operands by rank, orders them by step, frees copies after the last use.

Annotations do not survive Dask's array optimisation; this plugin sees the tasks after all optimisers, as TaskStates
that are not yet running, and reads from each `Product` where it belongs.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any

from distributed import SchedulerPlugin
from distributed.scheduler import Scheduler, TaskState

from distmm.graph import Placed, Product
from distmm.plan import Plan

__all__ = ["PlacementPlugin"]


class PlacementPlugin(SchedulerPlugin):
    """Ranks, placement, priority and replica release for the products of one scheduler.

    Rank r is a slot in `ranks`, the address of a worker. A replacement worker inherits the rank of the dead worker of
    the same name, so that after a loss the blocks of C have the same homes as before.
    """

    name = "distmm-placement"
    idempotent = True

    def __init__(self) -> None:
        self.ranks: list[str] = []
        self.names: list[object] = []
        self.plans: dict[str, Plan] = {}  # product -> its plan; missing where the client has expanded the graph
        self.total: Counter[str] = Counter()  # product -> tasks
        self.done: defaultdict[str, set[object]] = defaultdict(set)  # product -> keys of finished tasks
        self.forgotten: Counter[str] = Counter()  # product -> tasks that the scheduler has forgotten
        self.uses: Counter[tuple[object, int]] = Counter()  # (operand key, rank) -> product tasks that still need it
        self.home: dict[object, str] = {}  # operand key -> address that keeps its copy
        self.used_up: set[tuple[object, int]] = set()

    async def start(self, scheduler: Scheduler) -> None:
        """Take the workers that are there as ranks, in the order of their names."""
        self.scheduler = scheduler
        self.loop = asyncio.get_running_loop()
        for worker in sorted(scheduler.workers.values(), key=lambda ws: (str(type(ws.name)), ws.name)):
            self.add_worker(scheduler, worker.address)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Give a new worker a rank: that of its dead namesake or of any dead worker, else the next."""
        if worker in self.ranks:
            return
        name = scheduler.workers[worker].name
        dead = [r for r, address in enumerate(self.ranks) if address not in scheduler.workers]
        rank = next((r for r in dead if self.names[r] == name), dead[0] if dead else len(self.ranks))
        if rank == len(self.ranks):
            self.ranks.append(worker)
            self.names.append(name)
            return
        old, self.ranks[rank], self.names[rank] = self.ranks[rank], worker, name
        for ts in scheduler.tasks.values():
            if ts.worker_restrictions and old in ts.worker_restrictions:
                ts.worker_restrictions = {worker}

    def update_graph(self, scheduler: Scheduler, *, tasks: list[object], **kwargs: Any) -> None:
        """Place and order the new product tasks and the tasks that make their operands."""
        if not self.total:  # no product is under way whose homes would move
            alive = [rank for rank, address in enumerate(self.ranks) if address in scheduler.workers]
            self.ranks, self.names = [self.ranks[r] for r in alive], [self.names[r] for r in alive]
        if not self.ranks:
            return
        new = {key for key in tasks if scheduler.tasks[key].state == "released"}
        placed = [ts for key in new if isinstance((ts := scheduler.tasks[key]).run_spec, Placed)]
        products = [ts for ts in placed if isinstance(ts.run_spec, Product)]
        for ts in placed:
            self._place(ts, ts.run_spec.placement.rank, ts.run_spec.placement.order)
        # Ascending: an operand that several steps read gets the priority of the first.
        for ts in sorted(products, key=lambda ts: ts.run_spec.placement.order):
            where = ts.run_spec.placement
            self.total[where.product] += 1
            if ts.run_spec.plan is not None:
                self.plans[where.product] = ts.run_spec.plan
            for operand, rank in ts.run_spec.operands():
                source = scheduler.tasks[operand]
                self.uses[operand, self._slot(where.rank)] += 1
                holder = next(iter(source.who_has or ()), None)
                self.home[operand] = holder.address if holder else self.ranks[self._slot(rank)]
                self._place_chain(source, new, rank, where.order)

    def _slot(self, rank: int) -> int:
        """Index into `ranks`: a plan for more workers than there are wraps around."""
        return rank % len(self.ranks)

    def _place(self, ts: TaskState, rank: int, order: int) -> None:
        ts.worker_restrictions = {self.ranks[self._slot(rank)]}
        ts.loose_restrictions = True  # a dead worker's tasks run elsewhere until a replacement comes
        first, *rest = ts.priority
        ts.priority = (first + order, *rest)  # ascending: step k before step k + 1, whatever the chain

    def _place_chain(self, ts: TaskState, new: set[object], rank: int, order: int) -> None:
        """Place the task that makes an operand at the operand's home, and with it the tasks that serve it alone.

        Its priority is that of the step that needs it: operands are loaded as they come due, not all at once.
        """
        while ts.key in new and not ts.worker_restrictions and not isinstance(ts.run_spec, Product):
            self._place(ts, rank, order)
            if len(ts.dependencies) != 1:
                return
            (ts,) = ts.dependencies
            if len(ts.dependents) != 1:
                return

    def transition(self, key: object, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Count finished product tasks and note which copies of operands have seen their last use."""
        if finish not in ("memory", "forgotten"):
            return
        ts = self.scheduler.tasks[key]
        if not isinstance(ts.run_spec, Product):
            if finish == "forgotten":
                self.home.pop(key, None)
            return
        product = ts.run_spec.placement.product
        if key not in self.done[product]:
            self.done[product].add(key)
            self._release_operands(ts.run_spec)
        if finish == "forgotten":
            self.forgotten[product] += 1
            if self.forgotten[product] == self.total[product]:
                for table in (self.plans, self.total, self.done, self.forgotten):
                    table.pop(product, None)

    def _release_operands(self, task: Product) -> None:
        slot = self._slot(task.placement.rank)
        for operand, _ in task.operands():
            self.uses[operand, slot] -= 1
            if self.uses[operand, slot] <= 0:
                del self.uses[operand, slot]
                if self.ranks[slot] != self.home.get(operand):
                    if not self.used_up:
                        self.loop.call_soon(self._drop_copies)
                    self.used_up.add((operand, slot))

    def _drop_copies(self) -> None:
        """Ask workers to drop operand copies after their last planned use, as Dask's Active Memory Manager would."""
        used_up, self.used_up = self.used_up, set()
        droppable: defaultdict[str, list[object]] = defaultdict(list)
        for key, slot in used_up:
            ts = self.scheduler.tasks.get(key)
            worker = self.scheduler.workers.get(self.ranks[slot])
            if worker is None or ts is None or ts.state != "memory" or worker not in ts.who_has or len(ts.who_has) < 2:
                continue
            # A worker refuses, with an error, to drop the input of a task that it is running.
            if not any(waiter.processing_on is worker for waiter in ts.waiters or ()):
                droppable[worker.address].append(key)
        for address, keys in droppable.items():
            self.scheduler.request_remove_replicas(address, keys, stimulus_id="distmm-last-use")

"""Scheduler plugin: places product tasks and operands by rank, opens step after step, copies blocks and frees them.

Annotations do not survive Dask's array optimisation; this plugin sees the tasks after all optimisers, as TaskStates
that are not yet running, and reads from each `Product` where it belongs.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from distributed import SchedulerPlugin
from distributed.scheduler import Scheduler, TaskState

from distmm.graph.layer import Placed, Product
from distmm.planning.plan import Plan
from distmm.planning.schedule import LOOKAHEAD
from distmm.scheduler.failure import fail, reported
from distmm.scheduler.lookahead import Window
from distmm.scheduler.output_slots import Places
from distmm.transfer import TOPIC

__all__ = ["PlacementPlugin"]

# Restriction of a task that has to wait for its step: no worker has this address, so that the scheduler keeps the task
# among those without a worker ("no-worker") and asks nobody to do it.
HELD = "distmm-held"


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
        self.resting = False  # Dask's Active Memory Manager, by our wish
        self._forget()

    def _forget(self) -> None:
        """Begin with no products."""
        self.plans: dict[str, Plan] = {}  # product -> its plan; missing where the client has expanded the graph
        self.total: Counter[str] = Counter()  # product -> tasks
        self.done: defaultdict[str, set[object]] = defaultdict(set)  # product -> keys of finished tasks
        self.known: defaultdict[str, set[object]] = defaultdict(set)  # product -> keys that the scheduler knows
        self.uses: Counter[tuple[object, int]] = Counter()  # (operand key, rank) -> product tasks that still need it
        self.home: dict[object, str] = {}  # operand key -> address that keeps its copy
        self.used_up: set[tuple[object, int]] = set()
        self.windows: dict[str, Window] = {}  # product -> its steps
        self.places: dict[str, Places] = {}  # product -> who may hold its C, where blocks leave their workers in waves
        self.copies: defaultdict[object, set[int]] = defaultdict(set)  # operand key -> ranks to copy it to, once there
        self.readers: Counter[str] = Counter()  # operand -> tasks that the scheduler knows and that read blocks of it
        self.opening: set[str] = set()  # products that have finished a step

    def give_up(self, error: Exception) -> None:
        """Let the products under way fail: what is known of them may be wrong, and nobody would open their steps."""
        self._forget()
        fail(self.scheduler, error, HELD)
        self._rest_memory_manager()

    async def start(self, scheduler: Scheduler) -> None:
        """Take the workers that are there as ranks, in the order of their names."""
        self.scheduler = scheduler
        self.loop = asyncio.get_running_loop()
        self.runs: WeakValueDictionary[str, Places] = WeakValueDictionary()  # places of products that are one run
        for worker in sorted(scheduler.workers.values(), key=lambda ws: (str(type(ws.name)), ws.name)):
            self.add_worker(scheduler, worker.address)

    @reported
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

    @reported
    def update_graph(self, scheduler: Scheduler, *, keys: Iterable[object], **kwargs: Any) -> None:
        """Place and order the new product tasks and the tasks that make their operands."""
        if not self.total:  # no product is under way whose homes would move
            alive = [rank for rank, address in enumerate(self.ranks) if address in scheduler.workers]
            self.ranks, self.names = [self.ranks[r] for r in alive], [self.names[r] for r in alive]
        if not self.ranks:
            return
        new = self._to_do(scheduler, keys)
        placed = [ts for key in new if isinstance((ts := scheduler.tasks[key]).run_spec, Placed)]
        products = [ts for ts in placed if isinstance(ts.run_spec, Product)]
        for ts in placed:
            if not isinstance(ts.run_spec, Product):  # it reads what products read and make, and waits for that alone
                self._place(ts, ts.run_spec.placement.rank)
                self._order(ts, ts.run_spec.placement.order)
        seen: set[object] = set()  # operands
        # Ascending: an operand that several steps read waits for the first one, and has its priority.
        for ts in sorted(products, key=lambda ts: ts.run_spec.placement.order):
            where, plan = ts.run_spec.placement, ts.run_spec.plan
            if plan is not None and where.product not in self.plans:
                self.plans[where.product] = plan
                if plan.peak.output_slots is not None:
                    self.places[where.product] = self.runs.setdefault(where.run, Places(plan.peak.output_slots))
            window = self.windows.setdefault(where.product, Window(plan.lookahead if plan is not None else LOOKAHEAD))
            held = window.add(where.order, ts.key)
            rank = where.rank
            slot = self._slot(rank)
            held.tasks[ts.key] = rank
            self._hold(ts, where.order)
            if ts.key in self.done[where.product]:  # let go, and wanted again, perhaps before it was forgotten
                self.done[where.product].discard(ts.key)
            elif ts.key not in self.known[where.product]:
                self.total[where.product] += 1
            if ts.key not in self.known[where.product]:
                self.known[where.product].add(ts.key)
                self.readers.update(ts.run_spec.operand_names)
            for operand in ts.run_spec.operands():
                uses = self.uses[operand, slot]
                self.uses[operand, slot] = uses + 1
                if not uses:
                    held.copies.add((operand, slot))
                if operand in seen:
                    continue
                seen.add(operand)
                source, home = scheduler.tasks[operand], ts.run_spec.home(operand)
                holder = next(iter(source.who_has or ()), None)
                self.home[operand] = holder.address if holder else self.ranks[self._slot(home)]
                waits = self._serves_only(source, where.product)
                # On GPUs loads leave their slots to products: those that may begin do, before products of open steps.
                ahead = plan.lookahead if plan is not None and plan.cluster.device == "cuda" else 0
                for maker in self._makers(source, new):
                    self._hold(maker, where.order - ahead)
                    if waits:
                        held.tasks[maker.key] = home
                    else:
                        self._place(maker, home)
            self.opening.add(where.product)
        for ts in placed if self.places else ():
            if (places := self.places.get(ts.run_spec.placement.product)) is not None:
                places.expect(ts.run_spec)
        for product in {key[0] for key in keys if isinstance(key, tuple)} & self.places.keys():
            self.opening |= self.places[product].lift()
        self.loop.call_soon(self._open)  # after Dask has handed out, in an order of its own, what does not wait

    def _rest_memory_manager(self) -> None:
        """Keep Dask's Active Memory Manager from dropping copies while products are under way.

        Every 2 s it would drop one of each two, perhaps the one at home: then the block would travel again.
        """
        manager, busy = self.scheduler.extensions.get("amm"), any(window.left for window in self.windows.values())
        if manager is not None and busy and manager.running:
            manager.stop()
            self.resting = True
        elif manager is not None and not busy and self.resting:
            manager.start()
            self.resting = False

    @staticmethod
    def _to_do(scheduler: Scheduler, keys: Iterable[object]) -> set[object]:
        """Keys of the tasks that a new graph will run: not those behind results that are there, or on their way."""
        found: set[object] = set()
        stack = [scheduler.tasks[key] for key in keys if key in scheduler.tasks]
        while stack:
            ts = stack.pop()
            if ts.state == "released" and ts.key not in found:
                found.add(ts.key)
                stack.extend(ts.dependencies)
        return found

    def _slot(self, rank: int) -> int:
        """Index into `ranks`: a plan for more workers than there are wraps around."""
        return rank % len(self.ranks)

    def _place(self, ts: TaskState, rank: int) -> None:
        ts.worker_restrictions = {self.ranks[self._slot(rank)]}
        ts.loose_restrictions = True  # a dead worker's tasks run elsewhere until a replacement comes

    def _hold(self, ts: TaskState, order: int) -> None:
        ts.worker_restrictions, ts.loose_restrictions = {HELD}, False
        self._order(ts, order)

    @staticmethod
    def _order(ts: TaskState, order: int) -> None:
        first, *rest = ts.priority
        ts.priority = (first + order, *rest)  # ascending: step k before step k + 1, whatever the chain

    @staticmethod
    def _serves_only(ts: TaskState, product: str) -> bool:
        """Whether an operand may wait for its step: a product that needs this one's result needs no such operand."""
        return all(isinstance(d.run_spec, Placed) and d.run_spec.placement.product == product for d in ts.dependents)

    @staticmethod
    def _makers(ts: TaskState, new: set[object]) -> Iterator[TaskState]:
        """Yield the task that makes an operand and those that serve it alone: they have the operand's home and step."""
        while ts.key in new and not ts.worker_restrictions and not isinstance(ts.run_spec, Product):
            yield ts
            if len(ts.dependencies) != 1:
                return
            (ts,) = ts.dependencies
            if len(ts.dependents) != 1:
                return

    @reported
    def _open(self) -> None:
        """Place the tasks of steps that need wait no longer, and ask for the copies that they need."""
        ready, copied = {}, set()
        for product in self.opening:
            opened = self.windows[product].opened() if product in self.windows else []
            tasks = [
                (self.scheduler.tasks[key], rank)
                for _, held in opened
                for key, rank in held.tasks.items()
                if key in self.scheduler.tasks
            ]
            for ts, rank in self.places[product].admit(tasks) if product in self.places else tasks:
                self._place(ts, rank)
                if ts.state == "no-worker":
                    ready[ts.key] = "processing"
            for operand, slot in (copy for _, held in opened for copy in held.copies):
                self.copies[operand].add(slot)
                copied.add(operand)
        self.opening.clear()
        self._copy(copied)
        # Dask takes the last one first, and a worker begins what comes first.
        last_first = sorted(ready, key=lambda key: self.scheduler.tasks[key].priority, reverse=True)
        self.scheduler.transitions({key: ready[key] for key in last_first}, stimulus_id="distmm-open")
        self._rest_memory_manager()

    @reported
    def _copy(self, operands: Iterable[object]) -> None:
        """Ask workers to fetch the blocks of open steps that they will need, so that these travel behind arithmetic."""
        wanted: defaultdict[str, list[object]] = defaultdict(list)
        for key in operands:
            ts = self.scheduler.tasks.get(key)
            if ts is None or ts.state != "memory":
                continue
            for slot in self.copies.pop(key, ()):
                worker = self.scheduler.workers.get(self.ranks[slot])
                if worker is not None and worker not in ts.who_has and self.uses[key, slot]:
                    wanted[worker.address].append(key)
        for address, keys in wanted.items():
            self.scheduler.request_acquire_replicas(address, keys, stimulus_id="distmm-copy")

    @reported
    def transition(self, key: object, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Count finished product tasks, open the step that waited for them, free the copies of operands used up."""
        if self.places and finish in ("released", "forgotten", "erred"):
            self._leave(self.scheduler.tasks[key], start, finish)
        if finish not in ("memory", "forgotten", "erred"):
            return
        ts = self.scheduler.tasks[key]
        if not isinstance(ts.run_spec, Product):
            if finish == "memory" and key in self.copies:
                self.loop.call_soon(self._copy, [key])
            elif finish == "forgotten":
                self.home.pop(key, None)
                self.copies.pop(key, None)
            return
        product = ts.run_spec.placement.product
        if finish != "erred" and key not in self.done[product]:
            self.done[product].add(key)
            self._release_operands(ts.run_spec)
        if product in self.windows and self.windows[product].finish(ts.run_spec.placement.order, key):
            self._open_soon(product)
        if finish == "forgotten":
            if key in self.known[product]:
                self.known[product].discard(key)
                self._forget_operands(ts.run_spec)
            if not self.known[product]:
                for table in (self.plans, self.total, self.done, self.known, self.windows, self.places):
                    table.pop(product, None)

    def _forget_operands(self, task: Product) -> None:
        """Tell clients of operands that no task will read any more: each wave of a product has operands of its own."""
        names = task.operand_names
        self.readers.subtract(names)
        unread = [name for name in names if self.readers[name] <= 0]
        for name in unread:
            del self.readers[name]
        if unread:
            self.scheduler.log_event(TOPIC, unread)

    def _leave(self, ts: TaskState, start: str, finish: str) -> None:
        """Give back the place of a block of C that is no more in memory, or will not be."""
        if isinstance(ts.run_spec, Placed) and (start == "memory" or finish != "released"):
            product = ts.run_spec.placement.product
            if product in self.places:
                for waiting in self.places[product].leave(ts.run_spec):
                    self._open_soon(waiting)

    def _open_soon(self, product: str) -> None:
        if not self.opening:
            self.loop.call_soon(self._open)  # after the copies of a finished step have been dropped
        self.opening.add(product)

    def _release_operands(self, task: Product) -> None:
        slot = self._slot(task.placement.rank)
        for operand in task.operands():
            self.uses[operand, slot] -= 1
            if self.uses[operand, slot] <= 0:
                del self.uses[operand, slot]
                if self.ranks[slot] != self.home.get(operand):
                    if not self.used_up:
                        self.loop.call_soon(self._drop_copies)
                    self.used_up.add((operand, slot))

    @reported
    def _drop_copies(self) -> None:
        """Ask workers to drop operand copies after their last planned use, as Dask's Active Memory Manager would."""
        used_up, self.used_up = self.used_up, set()
        droppable: defaultdict[str, list[object]] = defaultdict(list)
        dropped: Counter[object] = Counter()
        for key, slot in used_up:
            ts = self.scheduler.tasks.get(key)
            worker = self.scheduler.workers.get(self.ranks[slot])
            if worker is None or ts is None or ts.state != "memory" or worker not in ts.who_has:
                continue
            # One stays: the home may have died, and several copies be dropped at the same time.
            if len(ts.who_has) - dropped[key] < 2:
                continue
            # A worker refuses, with an error, to drop the input of a task that it is running.
            if not any(waiter.processing_on is worker for waiter in ts.waiters or ()):
                droppable[worker.address].append(key)
                dropped[key] += 1
        for address, keys in droppable.items():
            self.scheduler.request_remove_replicas(address, keys, stimulus_id="distmm-last-use")

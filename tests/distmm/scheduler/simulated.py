"""A model of Dask's scheduler and its workers: as little of it as the state machine of products depends on.

The scheduler hears of what workers do by their reports, which may be late: a task ends on a worker that has been
removed, a replica arrives of a block that has been released, a task is started again meanwhile. Tasks go from state to
state by Dask's rules: a result is released when nobody waits for it, and forgotten when nobody knows a task that reads
it; what was lost with a worker, and is needed, is made again; what failed may be retried. Nothing here depends on the
order of sets, so that a seed alone repeats a schedule. `Checks` compares each decision of the state machine with what
the model knows. `simulated_play.py` makes the moves.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from distmm.graph.placement import Key, Placement
from distmm.scheduler.output_slots import reached
from distmm.scheduler.product_state import Limits, OperandBlock, PlannedTask
from distmm.scheduler.products import Products
from tests.distmm.scheduler.simulated_checks import Checks
from tests.distmm.scheduler.simulated_tasks import Report, Task, Worker

__all__ = ["Model"]


class Model:
    """One scheduler, its workers and the tasks of any number of products."""

    def __init__(self, workers: int, rng: random.Random, retries: int = 0) -> None:
        self.random, self.retries = rng, retries
        self.machine = Products()
        self.tasks: dict[Key, Task] = {}
        self.waiting: dict[Task, None] = {}
        self.wanted: dict[Key, None] = {}
        self.workers: dict[str, Worker] = {}  # those that the scheduler knows: some may be dead
        self.all_workers: list[Worker] = []
        self.checks = Checks(self)
        self.told: deque[tuple[str, Task]] = deque(maxlen=30)
        self.made: Counter[Key] = Counter()
        self.fetched: Counter[tuple[Key, str]] = Counter()
        self.runs = 0
        for name in range(workers):
            self.join(name)

    # Workers

    def join(self, name: object) -> None:
        """Let a worker join; it gets the rank of a dead one, or the next."""
        worker = Worker(f"tcp://{len(self.all_workers)}")
        self.all_workers.append(worker)
        self.workers[worker.address] = worker
        replaced = self.machine.ranks.join(worker.address, name)
        self.checks.join(replaced)
        if replaced is not None:
            for task in self.tasks.values():
                if task.address == replaced:
                    task.address = worker.address

    def remove(self, worker: Worker) -> None:
        """Have the scheduler see that a worker is dead: what it ran and held is lost."""
        del self.workers[worker.address]
        for task in list(self.tasks.values()):
            if task.on is worker:
                self._set(task, "waiting")
            if worker in task.copies:
                del task.copies[worker]
                if not task.copies:
                    self._lose(task)
        self.machine.ranks.leave(worker.address)

    def _lose(self, task: Task) -> None:
        self._set(task, "released")
        for reader in task.waiters:
            if reader.state == "running":
                self._set(reader, "waiting")
        self._await([task])

    # Tasks

    def submit(self, wanted: Iterable[Key], graph: Mapping[Key, Any]) -> None:
        """Send a graph to the scheduler, whose results a client wants."""
        wanted = list(wanted)
        self.machine.renumber()
        new = [Task(key, spec, retries=self.retries) for key, spec in graph.items() if key not in self.tasks]
        self.tasks |= {task.key: task for task in new}
        for task in new:
            task.needs = [self.tasks[key] for key in sorted(task.spec.dependencies, key=str)]
            for other in task.needs:
                other.readers[task] = None
        self.wanted |= dict.fromkeys(wanted)
        run, spoilt = self._wait([self.tasks[key] for key in wanted])
        awake = dict.fromkeys(task.key for task in run)
        planned = [
            PlannedTask(task.key, task.where, task.spec.is_first, task.operands, (0, self.random.random()))
            for task in run
            if task.product and task.where is not None
        ]
        self.random.shuffle(planned)
        for one in planned:
            task = self.tasks[one.key]
            task.done = task.closed = task.left = False
        others = [(task.key, task.where) for task in run if task.where is not None and not task.product]
        operands = {block: self._operand(self.tasks[block], awake) for one in planned for block in one.operands}
        limits = {one.where.product: Limits.of(self.tasks[one.key].spec.plan) for one in planned}
        self.checks.arrive(limits, [one.where for one in planned])
        arranged = self.machine.arrived(planned, others, operands, {key[0] for key in wanted}, limits)
        for key, _ in arranged.hold:
            self.tasks[key].held = True
        for key, rank, _ in arranged.place:
            self.tasks[key].address, self.tasks[key].held = self.machine.ranks.addresses[rank], False
        self._make_room(awake, wanted)
        for task in spoilt:
            self.fail(task)

    def _operand(self, task: Task, awake: Mapping[Key, None]) -> OperandBlock:
        readers = {reader.where.product if reader.where else None for reader in task.readers}
        makers, made = [], task
        while not task.product and made.key in awake and made.address is None and not made.held:
            makers.append(made.key)
            if len(made.needs) != 1 or len(made.needs[0].readers) != 1:
                break
            (made,) = made.needs
        return OperandBlock(tuple(makers), readers.pop() if len(readers) == 1 else None, sorted(self.holders(task.key)))

    def _make_room(self, awake: Mapping[Key, None], wanted: list[Key]) -> None:
        """Let what a client asks for fail if its tasks read more blocks of a streamed C at a time than fit."""

        def readers(key: Key) -> list[Key]:
            return [task.key for task in self.tasks[key].readers if task.state in ("waiting", "running")]

        def reads(key: Key) -> list[Key]:
            return [task.key for task in self.tasks[key].needs]

        def stays(key: Key) -> bool:
            return key in self.wanted or any(self.tasks[reader].product for reader in readers(key))

        names = dict.fromkeys(
            task.key[0] for key in (*awake, *wanted) for task in (self.tasks[key], *self.tasks[key].needs)
        )
        for _, _, blocks in self.machine.make_room(names, readers, reads, stays):
            needs = reached(blocks, readers)
            for key in wanted:
                if key in needs:
                    self.checks.refused.add(key)
                    self.fail(self.tasks[key])

    def _wait(self, tasks: Iterable[Task]) -> tuple[list[Task], list[Task]]:
        """Let released tasks wait, with all that they need; return them, and those that need what has failed."""
        stack, run, spoilt = list(tasks), [], []
        while stack:
            task = stack.pop()
            if task.state != "released":
                continue
            self._set(task, "waiting")
            run.append(task)
            for other in task.needs:
                other.waiters[task] = None
                stack.append(other)
            if any(other.state == "failed" for other in task.needs):
                spoilt.append(task)
        return run, spoilt

    def _await(self, tasks: Iterable[Task]) -> None:
        for spoilt in self._wait(tasks)[1]:
            self.fail(spoilt)

    def runnable(self) -> list[Task]:
        """Tasks that the scheduler may give to a worker."""
        if not self.workers:
            return []
        return [task for task in self.waiting if not task.held and all(need.state == "memory" for need in task.needs)]

    def start(self, task: Task) -> None:
        """Give a task to its worker, or to any one while that is dead."""
        worker = self.workers.get(task.address or "") or self.random.choice(list(self.workers.values()))
        self.runs += 1
        self._set(task, "running")
        task.on, task.run = worker, self.runs
        worker.running[task] = None

    def begin(self, task: Task) -> None:
        """Let a worker execute a task: it fetches what it reads first."""
        assert task.on is not None
        for need in task.needs:
            self.fetch(task.on, need.key)
        task.begun = True
        task.on.measure()

    def fetch(self, worker: Worker, key: Key) -> bool:
        """Let a worker fetch a replica, if it has none and somebody else has one; return whether it did."""
        travels = worker.fetch(key, self.all_workers)
        self.fetched[key, worker.address] += travels
        return travels

    def end(self, task: Task, fails: bool) -> None:
        """Let a worker end a task; the scheduler hears of it later."""
        worker = task.on
        assert worker is not None
        del worker.running[task]
        task.begun = False
        if not fails:
            worker.data[task.key] = task.nbytes
            self.made[task.key] += 1
        worker.reports.append(Report("failed" if fails else "done", task.key, task.run))

    def hear(self, worker: Worker) -> None:
        """Take the next report of a worker, as Dask's scheduler takes it."""
        report = worker.reports.popleft()
        task = self.tasks.get(report.key)
        current = task is not None and task.state == "running" and task.run == report.run
        if report.what == "failed":
            if task is not None and current:
                self._end_failed(task)
        elif report.what == "done" and task is not None and current:
            self._finish(task, worker)
        elif task is not None and task.state == "memory" and report.what == "holds" and report.key in worker.data:
            task.copies[worker] = None
        elif task is None or (worker not in task.copies and task.on is not worker):
            worker.data.pop(report.key, None)  # the scheduler has it freed

    def _finish(self, task: Task, worker: Worker) -> None:
        self._set(task, "memory")
        task.copies = {worker: None}
        self._let_go(task)
        if task.key not in self.wanted and not task.waiters:
            self._release(task)

    def _end_failed(self, task: Task) -> None:
        if task.retries:
            task.retries -= 1
            self._set(task, "released")
            self._await([task])
        else:
            self.fail(task)

    def fail(self, task: Task) -> None:
        """Let a task fail, and with it all that wait for its result."""
        stack = [task]
        while stack:
            task = stack.pop()
            if task.state in ("waiting", "running"):
                self._set(task, "failed")
                stack += task.waiters
                self._let_go(task)
                task.waiters.clear()

    def retry(self) -> None:
        """Let a client retry what it wants and what has failed."""
        stack, roots = [self.tasks[key] for key in self.wanted if self.tasks[key].state == "failed"], []
        while stack:
            task = stack.pop()
            failed = [need for need in task.needs if need.state == "failed"]
            stack += failed
            if not failed:
                roots.append(task)
        while roots:
            task = roots.pop()
            if task.state == "failed":
                self._set(task, "released")
                self._await([task])
                roots += task.readers

    def _let_go(self, task: Task) -> None:
        for other in task.needs:
            other.waiters.pop(task, None)
            if other.waiters or other.key in self.wanted:
                continue
            if other.state == "memory":
                self._release(other)
            elif other.state in ("waiting", "running"):  # its reader has failed, and the client still wants that one
                self._set(other, "released")
                self._let_go(other)

    def _release(self, task: Task) -> None:
        for worker in task.copies:
            worker.data.pop(task.key, None)
        task.copies = {}
        self._set(task, "released")
        self._forget(task)

    def unwant(self, keys: Iterable[Key]) -> None:
        """Let a client give up results, made or not."""
        for key in keys:
            self.wanted.pop(key, None)
            if key in self.tasks:
                self._give_up(self.tasks[key])

    def _give_up(self, task: Task) -> None:
        if task.key in self.wanted or task.waiters or task.state == "forgotten":
            return
        if task.state == "memory":
            self._release(task)
            return
        if task.state in ("waiting", "running"):
            self._set(task, "released")
            for other in task.needs:
                other.waiters.pop(task, None)
        needs = list(task.needs)
        self._forget(task)
        for other in needs:
            self._give_up(other)

    def _forget(self, task: Task) -> None:
        if task.key in self.wanted or task.readers or task.state == "forgotten":
            return
        del self.tasks[task.key]
        self._set(task, "forgotten")
        for other in task.needs:
            other.readers.pop(task, None)
            other.waiters.pop(task, None)
            if other.state in ("released", "failed"):
                self._forget(other)
            else:
                self._give_up(other)

    # What the state machine is told, as the plugin tells it

    def _set(self, task: Task, state: str) -> None:
        before, task.state = task.state, state
        if before == "waiting":
            del self.waiting[task]
        if before == "running" and task.on is not None:
            task.on.running.pop(task, None)
            if state != "memory":
                task.on.data.pop(task.key, None)  # the worker is told to free it, ended or not
            task.on, task.begun = None, False
        if state == "waiting":
            self.waiting[task] = None
        elif state == "released" and (task.waiters or task.key in self.wanted):
            return  # it is made again
        elif state == "memory":
            self.tell("finished", task)
        elif state == "released":
            self.tell("released" if before == "memory" else "given_up", task)
        elif state == "failed":
            self.tell("given_up", task)
        elif state == "forgotten":
            self.tell("forgotten", task)

    def tell(self, event: str, task: Task) -> None:
        """Tell the state machine what has happened to a task."""
        self.told.append((event, task))
        if task.where is not None:
            self.checks.told(event, task)
            getattr(self.machine, event)(task.key, task.where)
        elif event == "finished":
            self.machine.block_loaded(task.key)
        elif event == "forgotten":
            self.machine.replicas.forget(task.key)

    # Decisions

    def decide(self) -> None:
        """Carry out what the state machine decides, and check it."""
        decided, addresses = self.machine.decide(self.holders), self.machine.ranks.addresses
        for block, rank in decided.drop:
            task, worker = self.tasks[block], self.workers.get(addresses[rank])
            self.checks.drop(task, rank)
            if worker is not None and not any(waiter.on is worker for waiter in task.waiters):
                task.copies.pop(worker, None)
                worker.data.pop(block, None)
        for key, rank in decided.start:
            if (started := self.tasks.get(key)) is not None:
                self.checks.start(started, rank)
                started.held, started.address = False, addresses[rank]
        for block, rank in sorted(decided.copy, key=str):
            self.checks.copy(self.tasks[block], rank)
            worker = self.workers.get(addresses[rank])
            if worker is not None and block not in worker.data and block not in worker.asked:
                worker.asked.append(block)  # Dask's workers ask once, and for nothing that they have
        self.checks.slots()

    def holders(self, key: Key) -> set[int]:
        """Ranks that hold a block, as far as the scheduler knows."""
        task, alive = self.tasks.get(key), self.machine.ranks.alive
        if task is None or task.state != "memory":
            return set()
        return {alive[worker.address] for worker in task.copies if worker.address in alive}

    def rank(self, where: Placement) -> int:
        """Rank of the cluster that owns a block."""
        return where.rank % self.checks.workers[where.product]

"""A graph that has just arrived on Dask's scheduler, as the state machine is told of it; where its tasks may run."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

from distributed.scheduler import Scheduler, TaskState

from distmm.errors import InputError
from distmm.graph.dask_tasks import PlacedTask, ProductTask, is_view
from distmm.graph.placement import Key, Placement
from distmm.scheduler import dask_internals
from distmm.scheduler.product_state import Limits, OperandBlock, PlannedTask
from distmm.scheduler.products import Products

# States of tasks that still have to run.
PENDING = frozenset({"waiting", "no-worker", "queued", "processing"})


class NewGraph:
    """The tasks that clients want now, and those that make their operands.

    Attributes
    ----------
    wanted : set of keys
        Results that a client keeps.
    new : set of keys
        Tasks that will run.
    placed : list of TaskState
        Those of them that know their place.
    refused : dict
        Products that cannot run where the user lets them, with the reasons. They are in none of the following.
    tasks, others, operands, limits
        As for `Products.arrived`.
    """

    def __init__(self, scheduler: Scheduler, products: Products, wanted: set[object]) -> None:
        self.known, self.products, self.wanted = scheduler.tasks, products, wanted
        self.restrictions = Restrictions(scheduler, products)
        self.new = dask_internals.to_run(scheduler, wanted)
        tasks = [self.known[key] for key in self.new]
        dask_internals.prepare(tasks)
        self.placed = [ts for ts in tasks if isinstance(ts.run_spec, PlacedTask)]
        self.refused = self.restrictions.read(self.placed)
        self.tasks: list[PlannedTask] = []
        self.others: list[tuple[Key, Placement]] = []
        self.operands: dict[Key, OperandBlock] = {}
        self.limits: dict[str, Limits] = {}
        for ts in self.placed:
            task, where = ts.run_spec, ts.run_spec.placement
            if where.product in self.refused:
                continue
            if not isinstance(task, ProductTask):
                self.others.append((task.key, where))
                continue
            blocks = task.operands()
            after = bool(task.then), task.reads_its_block
            self.tasks.append(PlannedTask(task.key, where, task.is_first, blocks, ts.priority, *after))
            for block in blocks:
                if block not in self.operands:
                    self.operands[block] = self._operand(self.known[block])
            if where.product not in self.limits and where.product not in products.products:
                self.limits[where.product] = Limits.of(task.plan)

    @property
    def kept(self) -> set[str]:
        """Names of arrays whose blocks clients keep."""
        return {key[0] for key in self.wanted if isinstance(key, tuple)}

    @property
    def read(self) -> set[str]:
        """Names of arrays whose blocks its tasks make or read, or clients keep; also of products in fused tasks."""
        tasks = [ts for key in self.new for ts in (self.known[key], *self.known[key].dependencies)]
        products = {ts.run_spec.placement.product for ts in tasks if isinstance(ts.run_spec, ProductTask)}
        return self.kept | products | {ts.key[0] for ts in tasks if isinstance(ts.key, tuple)}

    def readers(self, key: Key) -> list[Key]:
        """Tasks that are to run and read the result of a task."""
        found = [ts.key for ts in self.known[key].dependents if ts.key in self.new or ts.state in PENDING]
        # A view keeps the memory of the block: a task that reads the view reads the block.
        views = [each for each in found if is_view(self.known[each].run_spec)]
        return found + [reader for view in views for reader in self.readers(view)]

    def reads(self, key: Key) -> list[Key]:
        """Tasks whose results a task reads."""
        return [ts.key for ts in self.known[key].dependencies]

    def stays(self, key: Key) -> bool:
        """Whether a block stays in memory: a client keeps it, or another product reads it."""
        by_product = (isinstance(self.known[reader].run_spec, ProductTask) for reader in self.readers(key))
        return key in self.wanted or bool(self.known[key].who_wants) or any(by_product)

    def _operand(self, ts: TaskState) -> OperandBlock:
        """Describe a block of A or B."""
        alive, restrictions = self.products.ranks.alive, self.restrictions
        holders = [alive[worker.address] for worker in ts.who_has or () if worker.address in alive]
        if ts.key not in self.new or isinstance(ts.run_spec, ProductTask):
            return OperandBlock(holders=holders)
        readers = {
            dependent.run_spec.placement.product if isinstance(dependent.run_spec, PlacedTask) else None
            for dependent in ts.dependents
        }
        at = {rank for name in readers for rank in restrictions.ranks(name)}
        makers = dask_internals.makers(ts, self.new, lambda maker: restrictions.allow(maker, at))
        reader = readers.pop() if len(readers) == 1 else None
        return OperandBlock(tuple(maker.key for maker in makers), reader, holders)


class Restrictions:
    """Where the user lets the tasks of a new graph run: by `workers=`, `resources=` and Dask's annotations.

    A product whose tasks are restricted runs on the ranks that all of them may use. A task keeps its resources, so Dask
    counts them.

    Attributes
    ----------
    products : dict
        The ranks of each product that arrives and may not run on all.
    """

    def __init__(self, scheduler: Scheduler, products: Products) -> None:
        self.scheduler, self.under_way, self.addresses = scheduler, products.products, products.ranks.addresses
        self.products: dict[str, tuple[int, ...]] = {}
        self._of: dict[Hashable, tuple[int, ...] | None] = {None: None}  # many tasks have the same restrictions

    def read(self, tasks: Iterable[TaskState]) -> dict[str, Exception]:
        """Find the ranks of the products that arrive; return the products that cannot run, with the reasons."""
        refused: dict[str, Exception] = {}
        for ts in tasks:
            task, name = ts.run_spec, ts.run_spec.placement.product
            if not isinstance(task, ProductTask) or name in refused:
                continue
            if task.annotations:
                dask_internals.annotate(self.scheduler, ts, task.annotations)
            may = self._allowed(ts)
            before = self.products.get(name)
            if may is None or may == before:
                continue
            ranks = may if before is None else tuple(rank for rank in may if rank in before)
            self.products[name] = ranks
            try:
                self._check(name, ranks, ts)
            except InputError as error:
                refused[name] = error
        return refused

    def ranks(self, product: str | None) -> Collection[int]:
        """Ranks that a product uses; all for None."""
        if product in self.products:
            return self.products[product]
        return self.under_way[product].ranks if product in self.under_way else range(len(self.addresses))

    def allow(self, ts: TaskState, ranks: Collection[int]) -> bool:
        """Whether the user lets a task run on all of these ranks, and distmm has not placed it yet."""
        if dask_internals.is_placed(ts) or dask_internals.is_held(ts):
            return False
        may = self._allowed(ts)
        return may is None or may == ranks or set(may) >= set(ranks)

    def strict(self, ts: TaskState) -> tuple[int, ...] | None:
        """Ranks that a task may not leave even if their workers die; None if it may run on any worker then."""
        return None if ts.loose_restrictions else self._allowed(ts)

    def _allowed(self, ts: TaskState) -> tuple[int, ...] | None:
        asked = dask_internals.restrictions(ts)
        if asked not in self._of:
            found = dask_internals.allowed(self.scheduler, ts)
            ranks = (rank for rank, address in enumerate(self.addresses) if found is not None and address in found)
            self._of[asked] = None if found is None else tuple(ranks)
        return self._of[asked]

    def _check(self, name: str, ranks: tuple[int, ...], ts: TaskState) -> None:
        """Refuse a product that the restrictions leave no worker, or too little memory."""
        what = dask_internals.described(ts)
        if not ranks:
            raise InputError(
                f"product {name} cannot run with {what}: none of the {len(self.addresses)} workers of the cluster "
                f"satisfies that for all its tasks; name workers of the cluster, or start workers with these resources"
            )
        state, plan = self.under_way.get(name), ts.run_spec.plan
        if state is not None and not set(state.ranks) <= set(ranks):
            raise InputError(
                f"product {name} cannot run with {what}: another part of it is computed without this restriction; "
                f"wait until that has ended, or make a product of its own with dask.graph_manipulation.clone"
            )
        if plan is not None:
            plan.check_memory(workers=len(ranks))

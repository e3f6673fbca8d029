"""A graph that has just arrived on Dask's scheduler, as the state machine is told of it."""

from __future__ import annotations

from distributed.scheduler import Scheduler, TaskState

from distmm.graph.dask_tasks import PlacedTask, ProductTask, is_view
from distmm.graph.placement import Key, Placement
from distmm.scheduler import dask_internals
from distmm.scheduler.product_state import Limits, OperandBlock, PlannedTask
from distmm.scheduler.products import Products
from distmm.scheduler.restrictions import Restrictions

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
        dask_internals.let_readers_be_faster(tasks)
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
            self.tasks.append(PlannedTask(task.key, where, task.is_first, blocks, ts.priority))
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
        """Names of arrays whose blocks its tasks make or read, or clients keep."""
        tasks = (ts for key in self.new for ts in (self.known[key], *self.known[key].dependencies))
        return self.kept | {ts.key[0] for ts in tasks if isinstance(ts.key, tuple)}

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

"""Scheduler plugin: tells the state machine what happens to tasks and workers, and carries out what it decides.

Annotations would not survive Dask's array optimisation. The plugin sees tasks after all optimisers and before they run,
and reads from each `PlacedTask` where it belongs.

A fault in the plugin ends a product with its reason: the products of the graph that arrives, or the product of the task
that changes its state; elsewhere all products under way. Dask logs what a plugin raises and goes on, so tasks that wait
for their step would wait for ever.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import dask.optimization
import dask.order
from distributed import SchedulerPlugin
from distributed.scheduler import Scheduler, TaskState

from distmm.errors import DoesNotFitError
from distmm.graph.dask_tasks import PlacedTask
from distmm.graph.placement import Key, Placement
from distmm.scheduler import dask_extensions, dask_internals
from distmm.scheduler.dask_extensions import AdaptiveTarget, Changes, MemoryManager
from distmm.scheduler.new_graph import NewGraph
from distmm.scheduler.output_slots import reached
from distmm.scheduler.products import Products

logger = logging.getLogger(__name__)

# States of tasks that call for something, mostly for a word to the state machine.
TOLD = frozenset({"memory", "released", "erred", "forgotten", "no-worker"})

# If all workers are lost at once, tasks wait this long for the replacements of their own workers. Then they start on
# the workers that are there. Without the wait, the first worker that comes back would get all tasks.
STRANDED_SECONDS = 30.0

Method = TypeVar("Method", bound=Callable[..., Any])


def reported(method: Method) -> Method:
    """Call ``self.give_up`` with the exception that a method of the plugin raises, when Dask's call of it has ended."""

    @functools.wraps(method)
    def guarded(self: PlacementPlugin, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            logger.exception("distmm's plugin failed: the products under way are given up")
            self.loop.call_soon(self.give_up, error)

    return guarded  # type: ignore[return-value]


class PlacementPlugin(SchedulerPlugin):
    """Ranks, placement, priority, lookahead and replicas for the products of one scheduler."""

    name = "distmm-placement"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Give the workers that are there ranks, in the order of their names."""
        self.scheduler = scheduler
        self.loop = asyncio.get_running_loop()
        dask.order.order = dask_extensions.order
        dask.optimization.default_fused_keys_renamer = dask_extensions.fused_key
        self.memory_manager = MemoryManager(scheduler)
        self.products = Products()
        self.adaptive = AdaptiveTarget(scheduler, self._waiting)
        self.deciding = False
        self.watch: asyncio.TimerHandle | None = None
        self.changes = Changes(scheduler)
        self.said: dict[bytes, dict[str, Any]] = {}  # last answer of each worker to a question (`worker_answers`)
        for worker in sorted(scheduler.workers.values(), key=lambda ws: (str(type(ws.name)), ws.name)):
            self.add_worker(scheduler, worker.address)

    @property
    def ranks(self) -> list[str]:
        """Address of the worker of each rank."""
        return self.products.ranks.addresses

    def owner(self, where: Placement) -> str:
        """Address of the worker that runs a chain; empty if there has been no worker."""
        state, ranks = self.products.products.get(where.product), self.ranks
        if not ranks:
            return ""
        return ranks[where.rank % len(ranks) if state is None else state.rank(where.rank)]

    def _waiting(self) -> Iterable[tuple[TaskState, int, int]]:
        """By product: one of its tasks, how many are to be done, and how many of them may run at the same time."""
        for product in self.products.products.values():
            if (key := next(iter(product.tasks.keys() - product.done), None)) is not None:
                yield self.scheduler.tasks[key], product.total - len(product.done), product.parallel

    # Events

    @reported
    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Give a new worker a rank, and the tasks of the dead worker that it replaces."""
        self.changes.announce("workers")
        replaced = self.products.ranks.join(worker, scheduler.workers[worker].name)
        if replaced is not None:
            dask_internals.move_tasks(scheduler, replaced, worker)
        elif self.adaptive.asked:
            self.products.share(self.products.ranks.alive[worker])

    @reported
    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Note that a worker is dead."""
        self.changes.announce("workers")
        self.products.ranks.leave(worker)

    @reported
    def update_graph(
        self, scheduler: Scheduler, *, keys: Collection[object], tasks: Iterable[Key], **kwargs: Any
    ) -> None:
        """Hold or place the product tasks of a new graph. A fault ends the products of this graph alone.

        Tasks of the graph that nothing reads are forgotten, when Dask has handled the graph.
        """
        self.loop.call_soon(dask_internals.forget_unread, scheduler, tasks)
        if not self.ranks:
            return  # there has been no worker yet: the tasks run like any others
        try:
            self._arrive(set(keys))
        except Exception as error:
            logger.exception("distmm's plugin failed: the products of a new graph are given up")
            known = [scheduler.tasks[key] for key in tasks]
            self._refuse([ts for ts in known if ts.state == "released"], _fault(error))

    def _arrive(self, wanted: set[object]) -> None:
        """Hold or place the product tasks that clients want now, and the tasks that make their operands."""
        self.products.renumber()
        known, graph = self.scheduler.tasks, NewGraph(self.scheduler, self.products, wanted)
        restrictions = graph.restrictions
        arranged = self.products.arrived(
            graph.tasks, graph.others, graph.operands, graph.kept, graph.limits, restrictions.products
        )
        for key, order in arranged.hold:
            dask_internals.hold(known[key], order, restrictions.strict(known[key]))
        for key, rank, order in arranged.place:
            if restrictions.allow(known[key], {rank}):  # the user's own place of the task comes first
                dask_internals.place(known[key], self.ranks[rank], order, restrictions.strict(known[key]))
        self._make_room(graph)
        for name, error in graph.refused.items():
            failed = [ts for ts in graph.placed if ts.run_spec.placement.product == name]
            self._refuse(failed, error)
            dask_internals.unrestrict_operands(failed)
        self._decide_soon()  # after Dask has sent the tasks that do not wait, in its own order

    def _refuse(self, tasks: Iterable[TaskState], error: Exception) -> None:
        """Let the tasks of a product that have just arrived fail."""
        failed = [ts for ts in tasks if isinstance(ts.run_spec, PlacedTask)]
        for ts in failed:
            dask_internals.hold(ts, 0)
            self.products.forgotten(ts.key, ts.run_spec.placement)
        self.loop.call_soon(dask_internals.fail, self.scheduler, failed, error)

    @reported
    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Tell the state machine what a change of a task's state means. A fault ends the task's product."""
        self.changes.announce("memory")
        if finish not in TOLD:
            return
        try:
            self._tell(key, start, finish)
        except Exception as error:
            task = self.scheduler.tasks[key].run_spec
            if not isinstance(task, PlacedTask):
                raise
            name = task.placement.product
            logger.exception("distmm's plugin failed: product %s is given up", name)
            self.loop.call_soon(self.give_up_product, name, error)

    def _tell(self, key: Key, start: str, finish: str) -> None:
        products, ts = self.products, self.scheduler.tasks[key]
        if finish == "no-worker":
            dask_internals.park(self.scheduler, ts)
            if ts.state == "no-worker":
                self.loop.call_soon(self._start_elsewhere, [ts])
            return
        # A result or a task that was lost with its worker is computed again: the chain keeps its slot.
        if finish == "released" and (ts.waiters or ts.who_wants):
            return
        task = ts.run_spec
        if not isinstance(task, PlacedTask):
            if finish == "memory":
                products.block_loaded(key)
            elif finish == "forgotten":
                products.replicas.forget(key)
        elif finish == "memory":
            products.finished(key, task.placement)
        elif finish == "released" and start == "memory":
            products.released(key, task.placement)
        elif finish in ("released", "erred"):  # a failed task that needs it may keep the scheduler from forgetting it
            products.given_up(key, task.placement)
        else:
            products.forgotten(key, task.placement)
        if not self.deciding and products.undecided:
            self._decide_soon()

    def _make_room(self, graph: NewGraph) -> None:
        """Give each streamed product the slots that the readers of its C need, or let it fail if they do not fit.

        It is known only now whether a client keeps C, and whether tasks read blocks of several waves at a time.
        """
        known, products = self.scheduler.tasks, self.products
        if not any(state.limits.wave_orders for state in products.products.values()):
            return
        for name, slots, blocks in products.make_room(graph.read, graph.readers, graph.reads, graph.stays):
            # The tasks that the client asks for fail, and not C: other tasks may read its blocks one by one.
            failed = [known[key] for key in reached(blocks, graph.readers) & graph.wanted]
            plan = next(known[key].run_spec.plan for key in products.products[name].tasks)
            try:
                plan.check_memory(slots)
            except DoesNotFitError as error:
                self.loop.call_soon(dask_internals.fail, self.scheduler, failed, error)

    # Decisions

    def _decide_soon(self) -> None:
        if not self.deciding:
            self.deciding = True
            self.loop.call_soon(self._decide)

    @reported
    def _decide(self) -> None:
        """Carry out what the state machine decides."""
        self.deciding = False
        scheduler, known = self.scheduler, self.scheduler.tasks
        decided = self.products.decide(self._holders)
        for address, keys in self.products.ranks.by_address(decided.drop).items():
            dask_internals.drop_blocks(scheduler, address, keys)
        started: list[TaskState] = []
        for key, rank in decided.start:
            if (ts := known.get(key)) is not None:
                dask_internals.place(ts, self.ranks[rank])
                started.append(ts)
        for address, keys in self.products.ranks.by_address(decided.copy).items():
            dask_internals.copy_blocks(scheduler, address, keys)
        dask_internals.start(scheduler, started)
        if decided.busy is not None:
            self.memory_manager.pause(decided.busy)

    @reported
    def _start_elsewhere(self, tasks: Iterable[TaskState]) -> None:
        """Start tasks whose own workers have gone, or are paused, on other workers; later if no worker is there."""
        if self.scheduler.running:
            found = [ts for ts in tasks if dask_internals.elsewhere(self.scheduler, ts, self.ranks)]
            dask_internals.start(self.scheduler, found)
        if self.watch is None and any(map(dask_internals.is_placed, self.scheduler.unrunnable)):
            self.watch = self.loop.call_later(STRANDED_SECONDS, self._start_stranded)

    def _start_stranded(self) -> None:
        self.watch = None
        self._start_elsewhere(list(self.scheduler.unrunnable))

    async def close(self) -> None:
        """Stop looking for stranded tasks, and telling of changes."""
        self.changes.announce("workers")
        if self.watch is not None:
            self.watch.cancel()

    def _holders(self, key: Key) -> Collection[int]:
        """Ranks that hold a block."""
        ts, alive = self.scheduler.tasks.get(key), self.products.ranks.alive
        if ts is None or ts.state != "memory":
            return ()
        return {alive[worker.address] for worker in ts.who_has or () if worker.address in alive}

    # Faults

    @reported
    def give_up_product(self, name: str, error: Exception) -> None:
        """Let a product fail: its state here may be wrong, and its steps would never open."""
        self.products.give_up(name)
        known = self.scheduler.tasks.values()
        tasks = [ts for ts in known if isinstance(ts.run_spec, PlacedTask) and ts.run_spec.placement.product == name]
        dask_internals.fail(self.scheduler, tasks, _fault(error))
        self._decide_soon()

    def give_up(self, error: Exception) -> None:
        """Let all products under way fail: the state that they share may be wrong."""
        self.products, self.deciding = Products(self.products.ranks), False
        known = self.scheduler.tasks.values()
        held = [ts for ts in known if isinstance(ts.run_spec, PlacedTask) or dask_internals.is_held(ts)]
        dask_internals.fail(self.scheduler, held, _fault(error))
        self.memory_manager.pause(False)


def _fault(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"distmm's plugin of the scheduler failed ({type(error).__name__}: {error}), and the products under way "
        f"cannot go on: compute them again, and report it with the scheduler's log"
    )

"""Where the user lets the tasks of a new graph run: by `workers=`, `resources=` and Dask's annotations.

A product whose tasks are restricted runs on the ranks that all of them may use. A task keeps its resources, so Dask
counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

from distributed.scheduler import Scheduler, TaskState

from distmm.errors import InputError
from distmm.graph.dask_tasks import ProductTask
from distmm.scheduler import dask_internals
from distmm.scheduler.products import Products


class Restrictions:
    """Those of one graph.

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

"""How far a product is, as the scheduler's plugin counts it."""

from __future__ import annotations

from distributed import Client, Scheduler

from distmm.scheduler.plugin import PlacementPlugin


def finished(client: Client, product: str) -> tuple[int, int]:
    """Product tasks that are done, and all of them; 0 of 0 for a product that is not under way."""

    def count(dask_scheduler: Scheduler) -> tuple[int, int]:
        state = dask_scheduler.plugins[PlacementPlugin.name].products.products.get(product)
        return (len(state.done), state.total) if state else (0, 0)

    found: tuple[int, int] = client.run_on_scheduler(count)
    return found

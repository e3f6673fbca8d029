"""``dask scheduler --preload distmm.telemetry.preload``: page and series exist before the first product."""

from __future__ import annotations

from distributed.scheduler import Scheduler

from distmm.telemetry.scheduler import Telemetry

__all__ = ["dask_setup"]


async def dask_setup(scheduler: Scheduler) -> None:
    """Start the telemetry of a scheduler; called by Dask, which has read this module's name from its command line."""
    await scheduler.register_scheduler_plugin(Telemetry(), idempotent=True)

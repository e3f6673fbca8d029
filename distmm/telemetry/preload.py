"""Preload module for ``dask scheduler --preload distmm.telemetry.preload``: adds page and series at the start."""

from __future__ import annotations

from distributed.scheduler import Scheduler

from distmm.telemetry.scheduler import Telemetry

__all__ = ["dask_setup"]


async def dask_setup(scheduler: Scheduler) -> None:
    """Start the telemetry of a scheduler. Dask calls this function of a preload module."""
    await scheduler.register_scheduler_plugin(Telemetry(), idempotent=True)

"""Preload module for ``dask scheduler --preload distmm.telemetry.preload``: adds page and series at the start."""

from __future__ import annotations

from distributed.scheduler import Scheduler

from distmm.telemetry.scheduler import Telemetry


def dask_setup(scheduler: Scheduler) -> None:
    """Add the telemetry of a scheduler, which starts its plugins after its preload modules."""
    scheduler.add_plugin(Telemetry(), idempotent=True)
